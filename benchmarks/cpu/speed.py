"""Forward, and forward and backward, against `scaled_dot_product_attention`, in alternating calls of one run."""

from functools import partial
from typing import Any

import torch

from benchmarks.cpu.settings import Bench, Figure, Outcome, floor_note
from polysketch.benchmarking import AttentionSettings, calls, time_attention
from polysketch.benchmarking.timing import ratio
from polysketch.benchmarking.ways import BASELINE, way

GIVEN, LEARNED = "features given", "learned sketch"
_BREAK_EVEN = 2_048
_FORWARD_TARGETS = {
    (GIVEN, _BREAK_EVEN): 1.0,
    (GIVEN, 16_384): 7.0,
    (GIVEN, 32_768): 14.0,
    (LEARNED, 16_384): 2.3,
    (LEARNED, 32_768): 4.5,
}
_BACKWARD_TARGETS = {(GIVEN, 8_192): 3.5, (GIVEN, 16_384): 7.0}
_DOUBLING_TARGETS = {32_768: 2.2}


def forward(bench: Bench) -> Outcome:
    """Ratios at every length, and what the last doubling costs."""
    outcome = _against_sdpa(bench, bench.settings.forward_lengths, _FORWARD_TARGETS, backward=False)
    outcome.figures += [_doubling(bench, name) for name in ("given", "learned")]
    return outcome


def backward(bench: Bench) -> Outcome:
    """Ratios of forward and backward together."""
    return _against_sdpa(bench, bench.settings.backward_lengths, _BACKWARD_TARGETS, backward=True)


def _against_sdpa(
    bench: Bench, lengths: tuple[int, ...], targets: dict[tuple[str, int], float], *, backward: bool
) -> Outcome:
    exact = tuple(length for length in lengths if length in bench.settings.exact_lengths)
    linear = tuple(length for length in lengths if length not in exact)
    measurements = _measurements(bench, exact, backward=backward, more=("polynomial",))
    measurements += _measurements(bench, linear, backward=backward)
    figures = [_figure(one, targets) for one in measurements if one["variant"] != BASELINE]
    return Outcome(figures, measurements)


def _measurements(
    bench: Bench, lengths: tuple[int, ...], *, backward: bool, more: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    if not lengths:
        return []
    variants = ("given", "learned", "random", *more)
    return time_attention(bench, _settings(bench, lengths=lengths, variants=variants, backward=backward))


def _settings(bench: Bench, **options: Any) -> AttentionSettings:
    settings = bench.settings
    sizes = {"heads": settings.heads, "sketch_size": settings.sketch_size, "local": settings.local}
    return AttentionSettings(**sizes, **options)


def _figure(one: dict[str, Any], targets: dict[tuple[str, int], float]) -> Figure:
    title = f"{one['direction']} at {one['length']:,}, {one['series']}: times as fast as SDPA"
    target = targets.get((one["series"], one["length"]))
    return Figure(title, one["ratio"], at_least=target, note=floor_note(one))


def _doubling(bench: Bench, name: str) -> Figure:
    """The time at the last length over that at half of it, alternating."""
    half, length = lengths = bench.settings.forward_lengths[-2:]
    settings = _settings(bench, lengths=lengths)
    one = way(name, settings.sizes)
    torch.manual_seed(0)
    functions = {
        str(size): calls.forward(one.prepare(settings.shape(size), bench.device, bench.dtype)) for size in lengths
    }
    progress = partial(_say, bench, f"doubling, {one.title}")
    seconds = bench.clock.alternate(functions, repeats=bench.repeats, progress=progress)
    cost = ratio(seconds[str(length)], seconds[str(half)])
    title = f"forward, {one.title}: time at {length:,} over time at {half:,}"
    return Figure(title, cost, at_most=_DOUBLING_TARGETS.get(length), note="2 is linear, 4 quadratic")


def _say(bench: Bench, what: str, text: str) -> None:
    bench.progress(f"{what}: {text}")
