"""Errors against the number of features and against the length, the optimum beside them, on logarithmic axes."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from polysketch.plotting import finish, picture

__all__ = ["plot_approximation"]

_WIDTH, _HEIGHT = 6.0, 4.5  # inches of a panel
_OPTIMUM = "truncated SVD of rank m"


def plot_approximation(measurements: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw a row of two panels for each degree of maps, and one for mechanisms, into `path`.

    Means over the inputs. Left against features at the largest length, right against length at the most features; of
    maps solid lines are held-out tokens, dotted ones those the map was fitted to, dashed black the optimum held out.

    Args:
        measurements: of `measure_maps` and `measure_mechanisms`.
        title: of the whole picture.
        path: its suffix (.png, .pdf, .svg) gives the format.

    Raises:
        ValueError: nothing to draw.
        ImportError: no matplotlib; it comes with the extra `plot`.
    """
    if not measurements:
        raise ValueError("expected measurements to plot, found none")
    maps = [one for one in measurements if one["kind"] == "map"]
    mechanisms = [one for one in measurements if one["kind"] == "mechanism"]
    rows: list[tuple[str, Any, list[dict[str, Any]]]] = [
        (f"(q . k)^{degree}", _draw_maps, [one for one in maps if one["degree"] == degree])
        for degree in dict.fromkeys(one["degree"] for one in maps)
    ]
    if mechanisms:
        rows.append(("normalised weights", _draw_mechanisms, mechanisms))
    size = (2 * _WIDTH, _HEIGHT * len(rows))
    with picture(path, size, rows=len(rows), columns=2, title=title, dpi=120) as places:
        for (name, draw, points), panels in zip(rows, places, strict=True):
            for axes, along, fixed in zip(panels, ("features", "length"), ("length", "features"), strict=True):
                most = max(one[fixed] for one in points)
                draw(axes, [one for one in points if one[fixed] == most], along)
                finish(axes, xlabel=along, ylabel="relative Frobenius error", title=f"{name}, {fixed} {most:,}")


def _draw_maps(axes: Any, points: list[dict[str, Any]], along: str) -> None:
    for number, name in enumerate(dict.fromkeys(one["series"] for one in points)):
        own = [one for one in points if one["series"] == name]
        _line(axes, own, along, lambda one: one["held_out"]["frobenius"], "o-", f"C{number}", name)
        _line(axes, own, along, lambda one: one["fitted"]["frobenius"], ":", f"C{number}", None)
    full = [one for one in points if one["rank"] == one["features"]]
    _line(axes, full, along, lambda one: one["held_out"]["optimum"], "ks--", None, _OPTIMUM)


def _draw_mechanisms(axes: Any, points: list[dict[str, Any]], along: str) -> None:
    for number, name in enumerate(dict.fromkeys(one["series"] for one in points)):
        own = [one for one in points if one["series"] == name]
        _line(axes, own, along, lambda one: one["frobenius"], "o-", f"C{number}", name)


def _line(
    axes: Any, points: list[dict[str, Any]], along: str, height: Any, style: str, colour: str | None, label: str | None
) -> None:
    """Through the means at each place; errors of zero, as of an exact mechanism, have no place on the axis."""
    places = sorted({one[along] for one in points})
    means = [fmean(height(one) for one in points if one[along] == place) for place in places]
    shown = [(place, mean) for place, mean in zip(places, means, strict=True) if mean > 1e-9]
    if shown:
        options = {} if colour is None else {"color": colour}
        axes.loglog(*zip(*shown, strict=True), style, label=label, **options)
    axes.set_xscale("log", base=2)
