"""Sections of `python -m benchmarks`: what is timed on a CPU, and the figures that are read from it."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import bfloat16_products, first_call, plain_features, targets, threads
from benchmarks.figures import Figure, Found
from benchmarks.scale import Scale, Settings
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

_TIMED: dict[type, Callable[[Workbench, Any], list[Measurement]]] = {
    AttentionSettings: time_attention,
    TrainingSettings: time_training,
    DecodingSettings: time_decoding,
}
_OTHERS: dict[str, Callable[[Workbench, Any], Found]] = {
    "bfloat16-products": bfloat16_products.section,
    "plain-features": plain_features.section,
    "threads": threads.section,
    "first-call": first_call.section,
}
"""Sections that are no times against one baseline."""


def run_section(name: str, bench: Workbench, scale: Scale) -> Found:
    """The figures of a section, and the measurements that they are read from."""
    bench = replace(bench, repeats=scale.rounds.get(name, scale.repeats))
    if name in _OTHERS:
        return _OTHERS[name](bench, scale.sections[name])
    return _against_baseline(name, bench, scale.sections[name])


def _against_baseline(name: str, bench: Workbench, sections: Sequence[Settings]) -> Found:
    """Times as fast as the baseline, memory, and what else a section compares."""
    figures, measurements = [], []
    bench = replace(bench, dtype=torch.bfloat16) if name == "bfloat16" else bench
    for settings in sections:
        found = _TIMED[type(settings)](bench, settings)
        for one in found:
            one["direction"] += targets.WHERE.get(name, "")
        figures += [figure for one in found for figure in _figures(one, found[0]["series"])]
        measurements += found
    if name == "forward":
        figures += [_doubling(bench, settings, way) for way in ("given", "learned")]
    if name == "decoding":
        figures += _late_over_early([one for one in found if one["series"] == "learned"])
    if name == "mechanisms":
        figures += _over_all({one["series"]: one for one in found})
    return Found(figures, measurements)


def _figures(one: Measurement, baseline: str) -> list[Figure]:
    """The ratio to the baseline, of which a training step's speed is told, and the memory where it was measured."""
    place, series = one.get("length") or one["position"], (one["direction"], one["series"])
    title, figures = f"{one['direction']} at {place:,}, {one['series']}", []
    if one["series"] != baseline:
        target = targets.SPEEDS.get(series, {}).get(place)
        floor = "" if one["floor_seconds"] is None else f"floor {one['floor_seconds']:.3g} s, "
        note = f"{one['seconds']:.3g} s, {floor}{one['tokens_per_second']:,.0f} tokens/s"
        figures.append(Figure(f"{title}: times as fast as {baseline}", one["ratio"], target=target, note=note))
    elif one["direction"].startswith("training"):
        figures.append(Figure(f"{title}: tokens a second", one["tokens_per_second"], "tokens/s"))
    if one.get("peak_bytes") is not None:
        target = targets.GIGABYTES.get(series, {}).get(place)
        figures.append(Figure(f"{title}: peak memory", one["peak_bytes"] / 1e9, "GB", target))
    return figures


def _over_all(found: dict[str, Measurement]) -> list[Figure]:
    """The slowest mechanism against the baseline, and the one that looks up heavy keys against the one without."""
    heavy, paper = found["polysketch-heavy"], found["polysketch-paper"]
    slowest = min((one for one in found.values() if one["series"] != "sdpa"), key=lambda one: one["ratio"])
    name, times = slowest["series"], ratio(heavy["all_seconds"], paper["all_seconds"])
    least = targets.slowest(name)
    return [
        Figure("the slowest mechanism: times as fast as sdpa", slowest["ratio"], target=least, note=name),
        Figure("polysketch-heavy over polysketch-paper, time", times, target=targets.HEAVY),
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
    return Figure(title, ratio(whole, half), target=targets.DOUBLING, note="2 is linear, 4 quadratic")


def _late_over_early(found: Sequence[Measurement]) -> list[Figure]:
    """What a token takes late in a context over what it takes early; what the one takes that folds a chunk."""
    early, late = found[0], found[-1]
    where = f"at {late['position']:,} over {early['position']:,}"
    medians, fold = late["seconds"] / early["seconds"], late["last_seconds"] / late["seconds"]
    percentiles, states = _percentile_99(late) / _percentile_99(early), late["state_bytes"] / early["state_bytes"]
    return [
        Figure(f"decoding, median {where}", medians, target=targets.STEADY),
        Figure(f"decoding, 99th percentile {where}", percentiles, target=targets.STEADY),
        Figure("decoding, folding a chunk over the median", fold, target=targets.FOLD),
        Figure(f"decoding, state bytes {where}", states, target=targets.SAME_STATE),
    ]


def _percentile_99(one: Measurement) -> float:
    """Of every round the median counts: one hiccup of the machine is not the code's."""
    return statistics.median(sorted(seconds)[int(0.99 * len(seconds))] for seconds in one["all_seconds"])
