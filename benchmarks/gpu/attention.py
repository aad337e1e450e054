"""Attention alone, 1k to 128k tokens: this library's against the fused kernels of scaled_dot_product_attention."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from benchmarks.budget import Section
from benchmarks.gpu.cases import out_of_memory, release_memory, text_of
from benchmarks.journal import Journal
from polysketch.benchmarking import calls, floors
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Floor, Shape
from polysketch.benchmarking.timing import Clock, Rates, matmul_precision, peak_memory

_LONGEST_CALL = 1.5  # seconds; a series that takes longer is not continued
_FUSED = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SDPA = tuple(_FUSED)


@dataclass(frozen=True)
class Series:
    """One way to attend, timed at many lengths.

    Attributes:
        name: in records and tables.
        prepare: (shape, device, dtype) -> Call with random inputs.
        floor: (shape, backward=...) -> Floor.
        precision: of float32 products inside.
    """

    name: str
    prepare: Callable[[Shape, torch.device, torch.dtype], Call]
    floor: Callable[..., Floor]
    precision: str = "highest"


@dataclass(frozen=True)
class Case:
    """One point of a series."""

    series: Series
    shape: Shape
    backward: bool

    @property
    def labels(self) -> dict[str, Any]:
        """What identifies it in a record."""
        sizes = {"batch": self.shape.batch, "length": self.shape.length}
        return {"series": self.series.name, **sizes, "direction": "forward+backward" if self.backward else "forward"}


def all_series() -> list[Series]:
    """The fused kernels first, then features given (sketch size, local chunk), then whole mechanisms."""
    fused = [Series(name, partial(calls.sdpa, backend=kind), _exact_floor) for name, kind in _FUSED.items()]
    linear = [_linear(32, 1024), _linear(32, 256), _linear(64, 1024), _linear(64, 256), _linear(32, 1024, "high")]
    sizes = {"sketch_size": 32, "local": 1024}
    whole = partial(calls.polysketch, **sizes), partial(floors.polysketch, **sizes, itemsize=2)
    polynomial = Series("polynomial degree=4", calls.polynomial, _exact_floor)
    return [*fused, *linear, Series("polysketch r=32 local=1024", *whole), polynomial]


def _linear(sketch_size: int, local: int, precision: str = "highest") -> Series:
    sizes = {"sketch_size": sketch_size, "local": local}
    name = f"linear r={sketch_size} local={local}{' tf32' if precision == 'high' else ''}"
    floor = partial(floors.linear_attention, **sizes, itemsize=2)
    return Series(name, partial(calls.linear, **sizes), floor, precision)


def cases(*, quick: bool) -> list[Case]:
    """All points, in the order they are timed: neighbours are compared, so lengths are the outer loop."""
    ways = all_series()
    return [
        Case(series, shape, backward)
        for length in ([64, 128] if quick else [2**11, 2**13, 2**15, 2**17, 2**10, 2**12, 2**14, 2**16])
        for shape in _shapes(length, quick)
        for backward in (False, True)
        for series in ways
    ]


def state_floors(points: list[Case], rates: Rates, journal: Journal) -> None:
    """Record, before anything is timed, what each point must cost."""
    for case in points:
        floor = case.series.floor(case.shape, backward=case.backward)
        journal.write(
            "floor", **case.labels, operations=floor.operations, bytes=floor.bytes, seconds=floor.seconds(rates)
        )


def time_cases(points: list[Case], clock: Clock, rates: Rates, section: Section, journal: Journal) -> None:
    """Time what fits; a series that became slow, ran out of memory or is unavailable is not continued."""
    ended: dict[tuple, int] = {}
    spent: dict[tuple, float] = {}
    for case in points:
        key = (case.series.name, case.backward, case.shape.batch == 1)
        reason = _reason_to_skip(case, ended.get(key), spent.get(key, 0.5), section)
        if reason:
            journal.write("skipped", **case.labels, reason=reason)
            continue
        started = time.monotonic()
        record = _time_case(case, clock, rates, journal)
        spent[key] = time.monotonic() - started
        if record["kind"] == "failed" or record["seconds"] > _LONGEST_CALL:
            ended[key] = min(case.shape.length, ended.get(key, case.shape.length))


def _reason_to_skip(case: Case, ended_at: int | None, last_seconds: float, section: Section) -> str | None:
    if ended_at is not None and case.shape.length >= ended_at:
        return f"the series ended at {ended_at} tokens"
    return None if section.fits(3 * last_seconds) else "no time left in this section"


def _time_case(case: Case, clock: Clock, rates: Rates, journal: Journal) -> dict[str, Any]:
    """One record, of a time or of a failure."""
    try:
        with matmul_precision(case.series.precision):
            measured = _measure(case, clock)
    except Exception as error:  # noqa: BLE001 - one broken case must not hide the others
        record = journal.write("failed", **case.labels, error=text_of(error), out_of_memory=out_of_memory(error))
        print(f"  {_title(case)}: {record['error']}", flush=True)
    else:
        floor = case.series.floor(case.shape, backward=case.backward).seconds(rates)
        record = journal.write("time", **case.labels, **measured, floor_seconds=floor)
        print(f"  {_title(case)}: {measured['seconds'] * 1e3:.3f} ms, floor {floor * 1e3:.3f} ms", flush=True)
    finally:
        release_memory(clock.device)
    return record


def _measure(case: Case, clock: Clock) -> dict[str, Any]:
    call = case.series.prepare(case.shape, clock.device, torch.bfloat16)
    function = calls.forward_backward(call) if case.backward else calls.forward(call)
    with peak_memory(clock.device) as peak:
        function()
    timing = clock.measure(function, limit_seconds=0.25)
    return {**vars(timing), "tokens_per_second": case.shape.tokens / timing.seconds, "peak_bytes": peak.bytes}


def _title(case: Case) -> str:
    labels = case.labels
    return f"{labels['series']}, {labels['batch']} x {labels['length']}, {labels['direction']}"


def _shapes(length: int, quick: bool) -> Iterator[Shape]:
    """A constant number of tokens, and batch 1."""
    tokens, heads = (256, 2) if quick else (2**17, 12)
    if tokens > length:
        yield Shape(tokens // length, length, heads)
    yield Shape(1, length, heads)


def _exact_floor(shape: Shape, *, backward: bool) -> Floor:
    return floors.exact_attention(shape, backward=backward, itemsize=2)
