"""Errors against the number of features and against the length, on logarithmic axes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from polysketch.plotting import finish, picture

__all__ = ["plot_approximation"]

_WIDTH, _HEIGHT = 6.0, 4.5  # inches of a panel
_OPTIMUM = "truncated SVD of rank m"
Measurement = dict[str, Any]


def plot_approximation(measurements: Sequence[Measurement], path: Path, error: str = "frobenius") -> None:
    """Draw a row of two panels for each degree of maps, and one for mechanisms, into `path`.

    Means over the inputs and seeds. Left against features at the largest length, right against length at the most
    features. Of maps solid lines are held-out tokens, dotted ones those the map was fitted to, dashed black the optimum
    held out. On the left a grey line falls as 1 / sqrt(features) from the first point of the first series.

    Args:
        measurements: of `measure_map` or `measure_mechanism`.
        path: its suffix (.png, .pdf, .svg) gives the format.
        error: which of the errors.

    Raises:
        ValueError: nothing to draw.
        ImportError: no matplotlib; it comes with the extra `plot`.
    """
    if not measurements:
        raise ValueError("expected measurements to plot, found none")
    maps = [one for one in measurements if one["kind"] == "map"]
    mechanisms = [one for one in measurements if one["kind"] == "mechanism"]
    rows: list[tuple[str, Any, list[Measurement]]] = [
        (f"(q . k)^{degree}", _draw_maps, [one for one in maps if one["degree"] == degree])
        for degree in dict.fromkeys(one["degree"] for one in maps)
    ]
    if mechanisms:
        rows.append(("mechanisms", _draw_mechanisms, mechanisms))
    size = (2 * _WIDTH, _HEIGHT * len(rows))
    with picture(path, size, rows=len(rows), columns=2, dpi=120) as places:
        for (name, draw, points), panels in zip(rows, places, strict=True):
            for axes, along, fixed in zip(panels, ("features", "length"), ("length", "features"), strict=True):
                most = max(one[fixed] for one in points)
                draw(axes, [one for one in points if one[fixed] == most], along, error)
                what = "relative Frobenius error" if error == "frobenius" else error.replace("_", " ")
                named = bool(axes.get_legend_handles_labels()[0])  # nothing is drawn where all errors are zero
                finish(axes, legend=named, xlabel=along, ylabel=what, title=f"{name}, {fixed} {most:,}")


def _draw_maps(axes: Any, points: list[Measurement], along: str, error: str) -> None:
    names = list(dict.fromkeys(one["series"] for one in points))
    for number, name in enumerate(names):
        own = [one for one in points if one["series"] == name]
        _line(axes, own, along, lambda one: one["held_out"][error], "o-", f"C{number}", name)
        _line(axes, own, along, lambda one: one["fitted"][error], ":", f"C{number}", None)
    if error == "frobenius":
        full = [one for one in points if one["rank"] == one["features"]]
        _line(axes, full, along, lambda one: one["held_out"]["optimum"], "ks--", None, _OPTIMUM)
    if along == "features":
        width = "width" if all("width" in one for one in points) else "features"
        first = [one for one in points if one["series"] == names[0]]
        _square_root(axes, first, lambda one: one["held_out"][error], width)


def _draw_mechanisms(axes: Any, points: list[Measurement], along: str, error: str) -> None:
    names = list(dict.fromkeys(one["series"] for one in points))
    for number, name in enumerate(names):
        own = [one for one in points if one["series"] == name]
        _line(axes, own, along, lambda one: one[error], "o-", f"C{number}", name)
    if along == "features":
        _square_root(axes, [one for one in points if one["series"] == names[0]], lambda one: one[error], "features")


def _square_root(axes: Any, points: list[Measurement], height: Callable[[Measurement], float], width: str) -> None:
    """The rate of the theorems, 1 / sqrt(r), from the first point on."""
    places = sorted({(one["features"], one[width]) for one in points})
    first = fmean(height(one) for one in points if one["features"] == places[0][0])
    falling = [first * (places[0][1] / one) ** 0.5 for _, one in places]
    axes.loglog([place for place, _ in places], falling, "-", color="0.7", label="1 / sqrt(r)", zorder=0)


def _line(
    axes: Any,
    points: list[Measurement],
    along: str,
    height: Callable[[Measurement], float | None],
    style: str,
    colour: str | None,
    label: str | None,
) -> None:
    """Through the means at each place; errors of zero, as of an exact mechanism, have no place on the axis."""
    places = sorted({one[along] for one in points})
    means = [fmean(height(one) or 0.0 for one in points if one[along] == place) for place in places]
    shown = [(place, mean) for place, mean in zip(places, means, strict=True) if mean > 1e-9]
    if shown:
        options = {} if colour is None else {"color": colour}
        axes.loglog(*zip(*shown, strict=True), style, label=label, **options)
    axes.set_xscale("log", base=2)
