"""Sections of `python -m benchmarks`: what is timed on a CPU by `polysketch.benchmarking`, and the targets."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.figures import Figure
from polysketch.benchmarking import (
    AttentionSettings,
    DecodingSettings,
    TrainingSettings,
    Workbench,
    calls,
    time_attention,
    time_decoding,
    time_training,
)
from polysketch.benchmarking.timing import ratio
from polysketch.benchmarking.ways import way

Measurement = dict[str, Any]
Settings = AttentionSettings | TrainingSettings | DecodingSettings

_FEW = 4  # heads where every mechanism is timed
_EXACT_TOO = ("given", "learned", "random", "polynomial")  # where exact polynomial attention does not take minutes


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        sections: what is timed against the baseline; the last two lengths of `forward` are doubled, and the positions
            of the last model of `decoding` are compared with each other.
        repeats: timed rounds of A B A B.
        rate_size: side of the matrices whose product gives the machine's rate.
    """

    sections: dict[str, tuple[Settings, ...]]
    repeats: int
    rate_size: int


FULL = Scale(
    {
        "forward": (
            AttentionSettings(lengths=(1_024, 2_048, 4_096, 8_192), mechanisms=_EXACT_TOO),
            AttentionSettings(lengths=(16_384, 32_768), memory=True),
        ),
        "backward": (
            AttentionSettings(lengths=(4_096, 8_192), mechanisms=_EXACT_TOO, backward=True),
            AttentionSettings(lengths=(16_384,), backward=True, memory=True),
        ),
        "training": (TrainingSettings(memory=True),),
        "decoding": (DecodingSettings(preset="tiny"), DecodingSettings(positions=(1_024, 8_192, 32_768))),
        "mechanisms": (AttentionSettings(lengths=(16_384,), mechanisms=("all",), heads=_FEW, memory=True),),
        "bfloat16": (AttentionSettings(lengths=(16_384,)),),
    },
    repeats=3,
    rate_size=2_048,
)
_TINY: dict[str, Any] = {"heads": 2, "local": 64}
QUICK = Scale(
    {
        "forward": (
            AttentionSettings(lengths=(256,), mechanisms=_EXACT_TOO, **_TINY),
            AttentionSettings(lengths=(512, 1_024), **_TINY),
        ),
        "backward": (AttentionSettings(lengths=(256,), mechanisms=("given",), backward=True, memory=True, **_TINY),),
        "training": (TrainingSettings(preset="tiny", contexts=(128,), local=64),),
        "decoding": (DecodingSettings(preset="tiny", positions=(64, 192), local=64),),
        "mechanisms": (
            AttentionSettings(lengths=(256,), mechanisms=("polysketch-paper", "polysketch-heavy"), **_TINY),
        ),
        "bfloat16": (AttentionSettings(lengths=(256,), **_TINY),),
    },
    repeats=1,
    rate_size=256,
)

_WHERE = {"mechanisms": f", {_FEW} heads", "bfloat16": " in bfloat16"}
"""What a section's figures say besides what is timed."""

AT_LEAST = {
    ("forward", "features given"): {2_048: 1.0, 16_384: 7.0, 32_768: 14.0},
    ("forward", "learned sketch"): {16_384: 2.3, 32_768: 4.5},
    ("forward+backward", "features given"): {8_192: 3.5, 16_384: 7.0},
    ("training step of mini", "learned"): {8_192: 1.2, 16_384: 1.8},
    ("training step of mini", "random"): {8_192: 2.0, 16_384: 3.5},
    ("decoding with tiny", "learned"): {8_192: 1.0, 32_768: 3.0},
    ("decoding with mini", "learned"): {8_192: 1.0, 32_768: 3.0},
    (f"forward{_WHERE['mechanisms']}", "hyper"): {16_384: 4.0},
    (f"forward{_WHERE['mechanisms']}", "llops"): {16_384: 6.0},
    (f"forward{_WHERE['bfloat16']}", "learned sketch"): {16_384: 6.0},
}
"""Direction and series -> length or position -> times as fast as the baseline, at least."""

AT_MOST_GIGABYTES = {
    ("forward", "features given"): {32_768: 0.1},
    ("forward", "learned sketch"): {32_768: 1.0},
    ("forward+backward", "features given"): {16_384: 0.25},
    ("forward+backward", "learned sketch"): {16_384: 0.5},
    ("training step of mini", "learned"): {16_384: 4.0},
    (f"forward{_WHERE['mechanisms']}", "performer"): {16_384: 0.15},
    (f"forward{_WHERE['mechanisms']}", "polarity"): {16_384: 0.15},
}
"""The same -> memory, of attention beyond inputs, outputs and gradients, of a step that of the whole process."""

_MOST_FOR_DOUBLING = 2.2
_MOST_OF_HEAVY = 1.6  # times what polysketch-paper takes
_WITHIN, _MOST_FOLD = 0.10, 5.0
_TIMED: dict[type, Callable[[Workbench, Any], list[Measurement]]] = {
    AttentionSettings: time_attention,
    TrainingSettings: time_training,
    DecodingSettings: time_decoding,
}


def run_section(name: str, bench: Workbench, scale: Scale) -> tuple[list[Figure], list[Measurement]]:
    """The figures of a section, and the measurements that they are read from."""
    figures, measurements = [], []
    bench = replace(bench, dtype=torch.bfloat16) if name == "bfloat16" else bench
    for settings in scale.sections[name]:
        found = _TIMED[type(settings)](bench, settings)
        for one in found:
            one["direction"] += _WHERE.get(name, "")
        figures += [figure for one in found for figure in _figures(one, found[0]["series"])]
        measurements += found
    if name == "forward":
        figures += [_doubling(bench, settings, way) for way in ("given", "learned")]
    if name == "decoding":
        figures += _late_over_early([one for one in found if one["series"] == "learned"])
    if name == "mechanisms":
        figures += _over_all({one["series"]: one for one in found})
    return figures, measurements


def _figures(one: Measurement, baseline: str) -> list[Figure]:
    """The ratio to the baseline, and the memory where it was measured."""
    place, series = one.get("length") or one["position"], (one["direction"], one["series"])
    title, figures = f"{one['direction']} at {place:,}, {one['series']}", []
    if one["series"] != baseline:
        target = AT_LEAST.get(series, {}).get(place)
        floor = "" if one["floor_seconds"] is None else f"floor {one['floor_seconds']:.3g} s, "
        note = f"{one['seconds']:.3g} s, {floor}{one['tokens_per_second']:,.0f} tokens/s"
        figures.append(Figure(f"{title}: times as fast as {baseline}", one["ratio"], at_least=target, note=note))
    if one.get("peak_bytes") is not None:
        target = AT_MOST_GIGABYTES.get(series, {}).get(place)
        figures.append(Figure(f"{title}: peak memory", one["peak_bytes"] / 1e9, "GB", at_most=target))
    return figures


def _over_all(found: dict[str, Measurement]) -> list[Figure]:
    """The slowest mechanism against the baseline, and the one that looks up heavy keys against the one without."""
    heavy, paper = found["polysketch-heavy"], found["polysketch-paper"]
    slowest = min((one for one in found.values() if one["series"] != "sdpa"), key=lambda one: one["ratio"])
    times = ratio(heavy["all_seconds"], paper["all_seconds"])
    return [
        Figure("the slowest mechanism: times as fast as sdpa", slowest["ratio"], at_least=1.0, note=slowest["series"]),
        Figure("polysketch-heavy over polysketch-paper, time", times, at_most=_MOST_OF_HEAVY),
    ]


def _doubling(bench: Workbench, settings: Any, name: str) -> Figure:
    """The time at the last length over that at half of it, alternating."""
    torch.manual_seed(0)
    one, lengths = way(name, settings.sizes), settings.lengths[-2:]
    shapes = {str(length): settings.shape(length) for length in lengths}
    functions = {at: calls.forward(one.prepare(shape, bench.device, bench.dtype)) for at, shape in shapes.items()}
    progress = bench.saying(f"doubling, {one.title}")
    half, whole = bench.clock.alternate(functions, repeats=bench.repeats, progress=progress).values()
    title = f"forward, {one.title}: time at {lengths[1]:,} over time at {lengths[0]:,}"
    return Figure(title, ratio(whole, half), at_most=_MOST_FOR_DOUBLING, note="2 is linear, 4 quadratic")


def _late_over_early(found: Sequence[Measurement]) -> list[Figure]:
    """What a token takes late in a context over what it takes early; what the one takes that folds a chunk."""
    early, late = found[0], found[-1]
    where = f"at {late['position']:,} over {early['position']:,}"
    within: dict[str, Any] = {"at_least": 1 - _WITHIN, "at_most": 1 + _WITHIN}
    fold = late["last_seconds"] / late["seconds"]
    return [
        Figure(f"decoding, median {where}", late["seconds"] / early["seconds"], **within),
        Figure(f"decoding, 99th percentile {where}", _percentile_99(late) / _percentile_99(early), **within),
        Figure("decoding, folding a chunk over the median", fold, at_most=_MOST_FOLD),
        Figure(f"decoding, state bytes {where}", late["state_bytes"] / early["state_bytes"], at_least=1, at_most=1),
    ]


def _percentile_99(one: Measurement) -> float:
    """Of every round the median counts: one hiccup of the machine is not the code's."""
    return statistics.median(sorted(seconds)[int(0.99 * len(seconds))] for seconds in one["all_seconds"])
