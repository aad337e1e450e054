"""Attention alone at several lengths, against `scaled_dot_product_attention`, in alternating calls of one run."""

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from polysketch import ops
from polysketch.benchmarking import calls, memory
from polysketch.benchmarking.agreement import checked_shape, require_agreement
from polysketch.benchmarking.growth import Growth
from polysketch.benchmarking.settings import AttentionSettings
from polysketch.benchmarking.way_names import BASELINE, GIVEN
from polysketch.benchmarking.ways import way
from polysketch.benchmarking.workbench import Workbench


def time_attention(bench: Workbench, settings: AttentionSettings) -> list[dict[str, Any]]:
    """Check every variant, then time all of them at every length.

    Returns:
        A measurement for each length and variant, the baseline first: length, series, seconds (the median),
        all_seconds, ratio (times as fast as the baseline: the median over neighbours in time), floor_seconds,
        operations, bytes (None where they are not counted), backend, peak_bytes beyond the inputs (None unless asked
        for). Beyond the budget `over_budget` is true, and all that would have been measured is None.

    Raises:
        ValueError: a result that disagrees with the reference; nothing has been timed then.
    """
    check_agreement(bench, settings)
    growth = Growth(settings.budget_seconds)
    timed = {length: _time_length(bench, settings, length, growth) for length in settings.lengths}
    peaks = _peaks(bench, settings, timed) if settings.memory else {}
    return [
        _measurement(bench, settings, length, name, seconds, peaks.get((name, length)))
        for length, seconds in timed.items()
        for name in settings.names
    ]


def check_agreement(bench: Workbench, settings: AttentionSettings) -> None:
    """Compare every variant, and every backend that will run, with the reference in float64 at a small length.

    The sketched part holds about half of the attention mass in it.

    Raises:
        ValueError: naming the error and the tolerance.
    """
    backends = _picked_backends(settings, bench)
    shape = checked_shape(settings.local, settings.heads, settings.head_dim, causal=not settings.bidirectional)
    for one in (way(name, settings.sizes) for name in settings.names):
        if one.prepare_check is None:
            continue
        # A mechanism takes "auto"; what that means at the timed lengths is checked here.
        for backend in backends if one.linear else [settings.backend]:
            make = partial(one.prepare_check, shape, bench.device, bench.dtype, backend=backend)
            what = one.title + (f" (backend {backend!r})" if one.linear else "")
            require_agreement(bench, make, what, backward=settings.backward)


def _picked_backends(settings: AttentionSettings, bench: Workbench) -> list[str]:
    """The backends of `linear_attention` that will run at any of the lengths, in order and each once.

    Raises:
        ValueError: an unknown backend.
    """
    asked = [settings.backend, *(["auto"] if set(settings.mechanisms) - {GIVEN} else [])]
    return list(dict.fromkeys(_picked(settings, bench, backend, n) for backend in asked for n in settings.lengths))


def _picked(settings: AttentionSettings, bench: Workbench, backend: str, length: int) -> str:
    shape = (settings.batch, settings.heads, length, settings.sketch_size)
    features = torch.zeros((), device=bench.device, dtype=bench.dtype).expand(shape)  # one number in memory
    return ops.linear_attention_backend(features, features, backend=backend)


def _time_length(bench: Workbench, settings: AttentionSettings, length: int, growth: Growth) -> dict[str, list[float]]:
    """Every time of every variant that is within the budget, by name."""
    torch.manual_seed(0)
    names = [name for name in settings.names if growth.allows(name, length)]
    shape, prepare = settings.shape(length), calls.forward_backward if settings.backward else calls.forward
    functions = {name: prepare(way(name, settings.sizes).prepare(shape, bench.device, bench.dtype)) for name in names}
    say = bench.saying(f"{settings.direction} at {length:,}")
    seconds = bench.clock.alternate(functions, repeats=bench.repeats, progress=say)
    for name in names:
        growth.note(name, length, statistics.median(seconds[name]))
    return seconds


def _peaks(
    bench: Workbench, settings: AttentionSettings, timed: Mapping[int, Mapping[str, list[float]]]
) -> dict[tuple[str, int], int]:
    """Peak bytes of every variant at every length at which it was timed."""
    found = {}
    for name in settings.names:
        shapes = [settings.shape(length) for length, seconds in timed.items() if name in seconds]
        peaks = memory.attention(bench, name, shapes, settings.sizes, backward=settings.backward)
        for shape, peak in zip(shapes, peaks, strict=True):
            found[name, shape.length] = peak
            bench.progress(f"memory at {shape.length:,}: {name}: {peak / 1e6:,.1f} MB")
    return found


def _measurement(
    bench: Workbench, settings: AttentionSettings, length: int, name: str, seconds: dict[str, list[float]], peak: Any
) -> dict[str, Any]:
    one, shape = way(name, settings.sizes), settings.shape(length)
    floor = one.floor(shape, backward=settings.backward, itemsize=bench.dtype.itemsize)
    asked = settings.backend if name == GIVEN else "auto"
    return {
        "direction": settings.direction,
        "length": length,
        "variant": name,
        "series": one.title,
        "backend": _picked(settings, bench, asked, length) if one.linear else None,
        **bench.measurement(seconds, name, BASELINE, shape.tokens, floor),
        "over_budget": name not in seconds,
        "peak_bytes": peak,
    }
