"""Forward, and forward and backward, against `scaled_dot_product_attention`, in alternating calls of one run."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import calls, floors
from benchmarks.calls import Call
from benchmarks.cpu.settings import Bench, Figure, Outcome
from benchmarks.floors import Floor, Shape
from benchmarks.timing import ratio

SDPA, GIVEN, LEARNED = "sdpa", "features given", "learned sketch"
_FORWARD_TARGETS = {(GIVEN, 16_384): 5.0, (LEARNED, 16_384): 2.0}
_BACKWARD_TARGETS = {(GIVEN, 8_192): 2.5}
_DOUBLING_TARGETS = {32_768: 2.2}


def forward(bench: Bench) -> Outcome:
    """Ratios at every length, and what the last doubling costs."""
    lengths = bench.settings.forward_lengths
    outcome = _against_sdpa(bench, "forward", lengths, calls.forward, _FORWARD_TARGETS)
    outcome.figures += [_doubling(bench, name) for name in (GIVEN, LEARNED)]
    return outcome


def backward(bench: Bench) -> Outcome:
    """Ratios of forward and backward together."""
    lengths = bench.settings.backward_lengths
    return _against_sdpa(bench, "forward+backward", lengths, calls.forward_backward, _BACKWARD_TARGETS)


def _against_sdpa(
    bench: Bench,
    direction: str,
    lengths: Sequence[int],
    prepare: Callable[[Call], Callable[[], Any]],
    targets: dict[tuple[str, int], float],
) -> Outcome:
    outcome = Outcome()
    for length in lengths:
        functions = {name: prepare(call) for name, call in _calls(bench, length).items()}
        say = partial(_say, bench, direction, length)
        seconds = bench.clock.alternate(functions, repeats=bench.settings.repeats, progress=say)
        outcome.measurements += [_measurement(bench, direction, length, name, seconds) for name in seconds]
        for name in (GIVEN, LEARNED):
            speed = ratio(seconds[SDPA], seconds[name])
            title = f"{direction} at {length:,}, {name}: times as fast as SDPA"
            note = _floor_note(outcome.measurements, name, length)
            outcome.figures.append(Figure(title, speed, at_least=targets.get((name, length)), note=note))
    return outcome


def _doubling(bench: Bench, name: str) -> Figure:
    """The time at the last length over that at half of it, alternating."""
    half, length = bench.settings.forward_lengths[-2:]
    functions = {str(size): calls.forward(_calls(bench, size, only=name)[name]) for size in (half, length)}
    say = partial(_say, bench, f"doubling, {name}", length)
    seconds = bench.clock.alternate(functions, repeats=bench.settings.repeats, progress=say)
    cost = ratio(seconds[str(length)], seconds[str(half)])
    title = f"forward, {name}: time at {length:,} over time at {half:,}"
    return Figure(title, cost, at_most=_DOUBLING_TARGETS.get(length), note="2 is linear, 4 quadratic")


def _calls(bench: Bench, length: int, only: str | None = None) -> dict[str, Call]:
    """The calls by name, on new random inputs."""
    torch.manual_seed(0)
    settings, cpu = bench.settings, torch.device("cpu")
    sizes = {"sketch_size": settings.sketch_size, "local": settings.local}
    makers: dict[str, Callable[..., Call]] = {
        SDPA: calls.sdpa,
        GIVEN: partial(calls.linear, **sizes),
        LEARNED: partial(calls.polysketch, **sizes),
    }
    shape = Shape(1, length, settings.heads)
    return {name: make(shape, cpu, torch.float32) for name, make in makers.items() if only in (None, name)}


def _measurement(
    bench: Bench, direction: str, length: int, name: str, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    median = statistics.median(seconds[name])
    floor = _floor(bench, name, length, backward=direction != "forward")
    return {
        "direction": direction,
        "length": length,
        "series": name,
        "seconds": median,
        "all_seconds": seconds[name],
        "tokens_per_second": length / median,
        "operations": floor.operations,
        "bytes": floor.bytes,
        "floor_seconds": floor.seconds(bench.rates),
    }


def _floor(bench: Bench, name: str, length: int, *, backward: bool) -> Floor:
    settings = bench.settings
    shape = Shape(1, length, settings.heads)
    counts: dict[str, Callable[..., Floor]] = {
        SDPA: floors.exact_attention,
        GIVEN: partial(floors.linear_attention, sketch_size=settings.sketch_size, local=settings.local),
        LEARNED: partial(floors.polysketch, sketch_size=settings.sketch_size, local=settings.local),
    }
    return counts[name](shape, backward=backward, itemsize=4)


def _floor_note(measurements: list[dict[str, Any]], name: str, length: int) -> str:
    here = next(one for one in reversed(measurements) if (one["series"], one["length"]) == (name, length))
    return f"{here['seconds']:.3g} s, floor {here['floor_seconds']:.3g} s"


def _say(bench: Bench, what: str, length: int, text: str) -> None:
    bench.progress(f"{what} at {length:,}: {text}")
