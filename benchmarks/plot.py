"""Time per token against length, on logarithmic axes: flat is linear time, a rising line of slope one is quadratic."""

from pathlib import Path
from typing import Any


def plot_time_per_token(measurements: list[dict[str, Any]], title: str, path: Path) -> bool:
    """Write a PNG of all directions and series; false, and nothing written, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    directions = sorted({one["direction"] for one in measurements})
    figure = Figure(figsize=(6 * len(directions), 4.5), layout="constrained")
    for axes, direction in zip(figure.subplots(1, len(directions), squeeze=False)[0], directions, strict=True):
        _draw(axes, [one for one in measurements if one["direction"] == direction])
        axes.set_title(direction)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    return True


def _draw(axes: Any, measurements: list[dict[str, Any]]) -> None:
    for name in dict.fromkeys(one["series"] for one in measurements):
        points = sorted((one["length"], one) for one in measurements if one["series"] == name)
        lengths = [length for length, _ in points]
        (line,) = axes.loglog(lengths, [one["seconds"] / length * 1e6 for length, one in points], "o-", label=name)
        floor = [one["floor_seconds"] / length * 1e6 for length, one in points]
        axes.loglog(lengths, floor, ":", color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens (dotted: floor)")
    axes.set_ylabel("microseconds per token")
    axes.legend()
