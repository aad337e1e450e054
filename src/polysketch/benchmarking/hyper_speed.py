"""HyperAttention against exact attention, causal and not, as in figure 4 of its paper (arXiv:2310.05869, section 4.2).

It approximates softmax attention, and how well depends on queries and keys: beside its speed stands its error on the
random ones that are timed.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from polysketch.benchmarking import calls, floors, mechanisms, memory
from polysketch.benchmarking.agreement import relative_error
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.growth import Growth
from polysketch.benchmarking.hyper_calls import HYPER, check_hyper, prepare_hyper
from polysketch.benchmarking.settings import HyperSettings
from polysketch.benchmarking.way_names import Sizes
from polysketch.benchmarking.ways import sdpa_programs
from polysketch.benchmarking.workbench import Workbench
from polysketch.progress import Progress

PAPER_LENGTH = 131_072
PAPER_RATIOS = {True: 5.4, False: 54.0}
"""How many times as fast as FlashAttention at that length, at most, by whether attention is causal."""

_DIRECTIONS = {"forward": False, "forward+backward": True}

Measurements = list[dict[str, Any]]


def time_hyper(bench: Workbench, settings: HyperSettings, *, show_progress: bool = False) -> Measurements:
    """Check HyperAttention, then time it at every length, both ways, against the fastest of SDPA's programs.

    Args:
        bench: where.
        settings: lengths, shape and options.
        show_progress: a line on standard error, with the time left, once the check is over.

    Returns:
        The measurements of `time_shape`, with `causal`, a `direction` that names that too, `peak_bytes` beyond the
        inputs (None unless asked for), and of HyperAttention `paper_ratio`, its paper's at 131,072 tokens. Beyond the
        budget `over_budget` is true, and all that would have been measured is None.

    Raises:
        ValueError: a result that disagrees with its definition; nothing has been timed then.
    """
    for causal in (False, True):
        check_hyper(bench, settings.shape(min(settings.lengths), causal), settings.options, backward=settings.backward)
    shapes = [settings.shape(length, causal) for length in settings.lengths for causal in (False, True)]
    growth = Growth(settings.budget_seconds)
    whole = sum(_operations(shape, settings) for shape in shapes)
    with Progress(total=whole, enabled=show_progress) as shown:
        found = [one for shape in shapes for one in _within_budget(bench, shape, settings, growth, shown)]
    return _with_peaks(bench, settings, found)


def _operations(shape: Shape, settings: HyperSettings) -> int:
    """Of a round, at least: what progress is counted in."""
    passes: list[dict[str, Any]] = [{"backward": each, "itemsize": 1} for each in (False, True)]
    passes = passes[: 1 + settings.backward]
    exact = sum(floors.exact_attention(shape, **each).operations for each in passes)
    ours = (mechanisms.floor(HYPER, settings.options, shape, **each) for each in passes)
    return round(exact + sum(each.operations for each in ours if each))


def _within_budget(
    bench: Workbench, shape: Shape, settings: HyperSettings, growth: Growth, shown: Progress
) -> Measurements:
    """One shape, as the whole benchmark names it."""
    whole = _operations(shape, settings)
    part, end = whole // (2 * (1 + bench.repeats) * (1 + settings.backward)), shown.done + whole
    sides = "causal" if shape.causal else "not causal"

    def series(direction: str, name: str) -> tuple[str, str, str]:
        return sides, direction, name

    found = time_shape(
        bench,
        shape,
        settings.options,
        backward=settings.backward,
        allows=lambda *which: growth.allows(series(*which), shape.length),
        progress=lambda text: shown.update(min(end, shown.done + part), f"{sides}, {text}"),
    )
    shown.update(end)
    for one in found:
        if not one["over_budget"]:
            growth.note(series(one["direction"], one["series"]), shape.length, one["seconds"])
    return [
        {
            **one,
            "direction": f"{sides}, {one['direction']}",
            "causal": shape.causal,
            "paper_ratio": PAPER_RATIOS[shape.causal] if one["series"] == HYPER else None,
        }
        for one in found
    ]


def _with_peaks(bench: Workbench, settings: HyperSettings, found: Measurements) -> Measurements:
    """With peak memory of every call that was timed, where it is asked for."""
    peaks: dict[int, int] = {}
    for which in dict.fromkeys(map(_which, found)) if settings.memory else ():
        series, causal, backward = which
        places = [place for place, one in enumerate(found) if _which(one) == which and not one["over_budget"]]
        shapes = [settings.shape(found[place]["length"], causal) for place in places]
        way = settings.way if series == HYPER else series
        peaks.update(zip(places, memory.attention(bench, way, shapes, Sizes(), backward=backward), strict=True))
        bench.progress(f"memory of {series}, {'causal' if causal else 'not causal'}, is measured")
    return [{**one, "peak_bytes": peaks.get(place)} for place, one in enumerate(found)]


def _which(one: Mapping[str, Any]) -> tuple[str, bool, bool]:
    return one["series"], one["causal"], one["backward"]


def time_shape(
    bench: Workbench,
    shape: Shape,
    options: Mapping[str, Any],
    *,
    backward: bool,
    series: str = HYPER,
    allows: Callable[[str, str], bool] = lambda direction, name: True,
    progress: Callable[[str], None] = lambda text: None,
) -> Measurements:
    """HyperAttention and SDPA's programs in alternating calls: forward and, with `backward`, with gradients as well.

    Args:
        bench: where.
        shape: of the inputs, which are random.
        options: of the mechanism `hyper`.
        backward: whether to time the gradients of query, key and value too.
        series: what HyperAttention is called.
        allows: direction and series -> whether to time it.
        progress: called with a line after every call.

    Returns:
        Measurements of each direction, SDPA's first: direction, backward, length, series, over_budget, what
        `Workbench.measurement` has, over the fastest of SDPA's programs, whose name is `baseline`, and `error`, of
        HyperAttention |found - exact| / |exact| of the output; None elsewhere, and where either is not timed forward.
    """
    torch.manual_seed(0)
    hyper = prepare_hyper(shape, bench.device, bench.dtype, options)
    exact = sdpa_programs(hyper.leaves, causal=shape.causal, backward=backward)
    timed = {**exact, series: hyper}
    error = _error(timed, [name for name in timed if allows("forward", name)], series)
    found = []
    for direction, with_gradients in list(_DIRECTIONS.items())[: 1 + backward]:
        allowed = {name: call for name, call in timed.items() if allows(direction, name)}
        seconds = _alternated(bench, allowed, f"{direction} at {shape.length:,}", with_gradients, progress)
        baseline = _fastest([name for name in exact if name in seconds], seconds)
        for name in timed:
            counted: dict[str, Any] = {"backward": with_gradients, "itemsize": bench.dtype.itemsize}
            ours = mechanisms.floor(HYPER, dict(options), shape, **counted) if name == series else None
            floor = ours if name == series else floors.exact_attention(shape, **counted)
            one = {"direction": direction, "backward": with_gradients, "length": shape.length, "series": name}
            one |= bench.measurement(seconds, name, baseline, shape.tokens, floor)
            one |= {"baseline": baseline or None, "over_budget": name not in seconds}
            found.append({**one, "error": error if name == series else None})
    return found


def _alternated(
    bench: Workbench, timed: Mapping[str, Call], what: str, backward: bool, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    prepare = calls.forward_backward if backward else calls.forward
    functions = {name: prepare(call) for name, call in timed.items()}
    return bench.clock.alternate(functions, repeats=bench.repeats, progress=lambda text: progress(f"{what}: {text}"))


def _fastest(names: Sequence[str], seconds: Mapping[str, list[float]]) -> str:
    """By medians; nothing where none was timed."""
    return min(names, key=lambda name: statistics.median(seconds[name]), default="")


@torch.no_grad()
def _error(timed: Mapping[str, Call], allowed: Sequence[str], series: str) -> float | None:
    """Of the output, in comparison with the first of SDPA's programs that is timed."""
    exact = next((name for name in allowed if name != series), None)
    if exact is None or series not in allowed:
        return None
    return relative_error(timed[series].function(), timed[exact].function())
