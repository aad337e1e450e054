"""Time per token against length, on logarithmic axes: flat is linear time, a rising line of slope one is quadratic."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COLUMNS = 3
_WIDTH, _HEIGHT = 6.0, 4.5  # inches of a panel


def plot_time_per_token(measurements: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw all series of a direction (forward, a training step, ...) in one panel, with their floors, into `path`.

    Args:
        measurements: as the benchmarks return them: direction, series, length or position, seconds,
            floor_seconds, and tokens, how many took so long.
        title: of the whole picture: machine, dtype, commit.
        path: its suffix (.png, .pdf, .svg) gives the format.

    Raises:
        ValueError: nothing to draw.
        ImportError: no matplotlib; it comes with the extra `plot`.
    """
    if not measurements:
        raise ValueError("expected measurements to plot, found none")
    from matplotlib.figure import Figure

    directions = list(dict.fromkeys(one["direction"] for one in measurements))
    columns = min(_COLUMNS, len(directions))
    rows = -(-len(directions) // columns)
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, direction in zip(panels, directions, strict=False):
        _draw(axes, [one for one in measurements if one["direction"] == direction])
        axes.set_title(direction)
    for axes in panels[len(directions) :]:
        axes.remove()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)


def _draw(axes: Any, measurements: list[dict[str, Any]]) -> None:
    for name in dict.fromkeys(one["series"] for one in measurements):
        points = sorted((one for one in measurements if one["series"] == name), key=_place)
        places = [_place(one) for one in points]
        (line,) = axes.loglog(places, _microseconds(points, "seconds"), "o-", label=name)
        axes.loglog(places, _microseconds(points, "floor_seconds"), ":", color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in tokens (dotted: floor)" if "position" in measurements[0] else "tokens (dotted: floor)")
    axes.set_ylabel("microseconds per token")
    axes.grid(alpha=0.3)
    axes.legend()


def _microseconds(points: list[dict[str, Any]], key: str) -> list[float]:
    """Of one token of a call, a training step or a decoding step."""
    return [one[key] / one["tokens"] * 1e6 for one in points]


def _place(measurement: dict[str, Any]) -> int:
    return measurement.get("length") or measurement["position"]
