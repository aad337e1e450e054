"""Attention alone, 1k to 128k tokens: this library's against the fused kernels of scaled_dot_product_attention."""

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.budget import Section
from benchmarks.gpu.cases import out_of_memory, release_memory, text_of
from benchmarks.journal import Journal
from polysketch import ops
from polysketch.benchmarking import calls, floors
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Floor, Shape
from polysketch.benchmarking.timing import Clock, Rates, peak_memory
from polysketch.benchmarking.ways import Sizes, way

_LONGEST_CALL = 1.5  # seconds; a series that takes longer is not continued
_FUSED = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_LOCAL = 256
_FEATURES = 256  # of power 1, beside flash-linear-attention's
SDPA = tuple(_FUSED)


@dataclass(frozen=True)
class Series:
    """One way to attend, timed at many lengths.

    Attributes:
        name: in records and tables.
        prepare: (shape, device, dtype) -> Call with random inputs.
        floor: (shape, backward=...) -> Floor.
        counted: (shape) -> operations of the forward pass, as rates are stated: of exact attention half of both
            products, of ours 4 (r (r + 1) / 2) (h + 1) + 2 local (h + 1) a token and head; backward twice as many.
    """

    name: str
    prepare: Callable[[Shape, torch.device, torch.dtype], Call]
    floor: Callable[..., Floor]
    counted: Callable[[Shape], float]


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
    """The fused kernels first, then features given, then whole mechanisms, random and learned."""
    fused = [Series(name, partial(calls.sdpa, backend=kind), _exact_floor, _exact) for name, kind in _FUSED.items()]
    if importlib.util.find_spec("fla") is not None:
        fused.append(Series(f"fla linear m={_FEATURES}", _fla, _power_one_floor, _power_one_operations))
    given = [_features(32, _LOCAL), _features(64, _LOCAL), _features(32, 1024)]
    whole = [_mechanism(size, learned) for learned in (False, True) for size in (32, 64)]
    power_one = Series(f"features m={_FEATURES}, power 1", _power_one, _power_one_floor, _power_one_operations)
    return [
        *fused,
        *given,
        *whole,
        power_one,
        Series("polynomial degree=4", way("polynomial", Sizes()).prepare, _exact_floor, _exact),
    ]


def _features(sketch_size: int, local: int) -> Series:
    sizes = {"sketch_size": sketch_size, "local": local}
    name = f"features r={sketch_size}{'' if local == _LOCAL else f' local={local}'}"
    floor = partial(floors.linear_attention, **sizes, itemsize=2)
    return Series(name, partial(calls.linear, **sizes), floor, partial(_linear, **sizes))


def _mechanism(sketch_size: int, learned: bool) -> Series:
    sizes: dict[str, Any] = {"sketch_size": sketch_size, "local": _LOCAL}
    prepare = way("learned" if learned else "random", Sizes(sketch_size, _LOCAL)).prepare
    floor = partial(floors.polysketch, **sizes, itemsize=2, learned=learned)
    return Series(f"{'learned' if learned else 'random'} r={sketch_size}", prepare, floor, partial(_linear, **sizes))


def _linear(shape: Shape, sketch_size: int, local: int) -> float:
    expanded, width = sketch_size * (sketch_size + 1) // 2, shape.head_dim + 1
    return shape.rows * (4 * expanded + 2 * min(local, shape.length)) * width


def _exact(shape: Shape) -> float:
    return shape.rows * 2 * shape.length * shape.head_dim


def _power_one_operations(shape: Shape) -> float:
    return shape.rows * 4 * _FEATURES * (shape.head_dim + 1)


def _power_one_floor(shape: Shape, *, backward: bool) -> Floor:
    forward = floors.cumulative_sums(shape, _FEATURES, itemsize=2)
    return forward.times(3) if backward else forward


def _power_one(shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """The same function as flash-linear-attention's, by ours."""
    query, key, value = _given(shape, device, dtype)

    def attend() -> Tensor:
        return ops.linear_attention(query, key, value, power=1, causal=True, normalize=False).output

    return Call(attend, [query, key, value])


def _fla(shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """flash-linear-attention's chunked linear attention, heads after tokens as it wants them."""
    from fla.ops.linear_attn import chunk_linear_attn

    query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in _given(shape, device, dtype))
    return Call(lambda: chunk_linear_attn(query, key, value, normalize=False)[0], [query, key, value])


def _given(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    widths = (_FEATURES, _FEATURES, shape.head_dim)
    sizes = [(shape.batch, shape.heads, shape.length, width) for width in widths]
    return [torch.randn(size, device=device, dtype=dtype) / size[3] ** 0.5 for size in sizes]


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
    """Record, before anything is timed, what each point must cost; nothing where that is done."""
    for case in points if not journal.of("floor") else ():
        floor = case.series.floor(case.shape, backward=case.backward)
        journal.write(
            "floor", **case.labels, operations=floor.operations, bytes=floor.bytes, seconds=floor.seconds(rates)
        )


def time_cases(points: list[Case], clock: Clock, rates: Rates, section: Section, journal: Journal) -> None:
    """Time what fits and is not in the journal; a series that became slow or failed is not continued."""
    ended: dict[tuple, int] = {}
    spent: dict[tuple, float] = {}
    for record in (*journal.of("time"), *journal.of("failed")):
        _note_end(record, ended)
    for case in points:
        if journal.has(**case.labels):
            continue
        key = _key(case.labels)
        reason = _reason_to_skip(case, ended.get(key), spent.get(key, 0.5), section)
        if reason:
            journal.write("skipped", **case.labels, reason=reason)
            continue
        started = time.monotonic()
        journal.write("begun", section="attention", **case.labels)
        _note_end(_time_case(case, clock, rates, journal), ended)
        spent[key] = time.monotonic() - started


def _key(labels: dict[str, Any]) -> tuple:
    return labels["series"], labels["direction"], labels["batch"] == 1


def _note_end(record: dict[str, Any], ended: dict[tuple, int]) -> None:
    """Where a series ends: at the shortest case that failed or was too slow."""
    if "series" in record and (record["kind"] == "failed" or record["seconds"] > _LONGEST_CALL):
        length = record["length"]
        ended[_key(record)] = min(length, ended.get(_key(record), length))


def _reason_to_skip(case: Case, ended_at: int | None, last_seconds: float, section: Section) -> str | None:
    if ended_at is not None and case.shape.length >= ended_at:
        return f"the series ended at {ended_at} tokens"
    return None if section.fits(3 * last_seconds) else "no time left in this section"


def _time_case(case: Case, clock: Clock, rates: Rates, journal: Journal) -> dict[str, Any]:
    """One record, of a time or of a failure."""
    try:
        measured = _measure(case, clock)
    except Exception as error:  # noqa: BLE001 - one broken case must not hide the others
        record = journal.write("failed", **case.labels, error=text_of(error), out_of_memory=out_of_memory(error))
        print(f"  {_title(case)}: {record['error']}", flush=True)
    else:
        record = journal.write("time", **case.labels, **measured, **_shares(case, measured["seconds"], rates))
        print(f"  {_title(case)}: {record['seconds'] * 1e3:.3f} ms, {record['tflops']:.0f} TFLOP/s", flush=True)
    finally:
        release_memory(clock.device)
    return record


def _shares(case: Case, seconds: float, rates: Rates) -> dict[str, float]:
    """What the time means: the rate by the count of operations, and shares of what the device can do at best."""
    floor = case.series.floor(case.shape, backward=case.backward)
    rate = case.series.counted(case.shape) * (3 if case.backward else 1) / seconds
    return {
        "floor_seconds": floor.seconds(rates),
        "tflops": rate / 1e12,
        "matrix_share": rate / rates.operations,
        "bandwidth_share": floor.bytes / seconds / rates.bandwidth,
    }


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
