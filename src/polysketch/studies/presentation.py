"""Tables in Markdown and plots of lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from polysketch.plotting import finish, picture, powers_of_two


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, columns padded to their widest cell; the first left-aligned, the others right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    rule = [":" + "-" * max(2, widths[0] - 1), *("-" * max(2, width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(_padded(row, widths)) + " |" for row in (header, rule, *rows))


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]


def number(value: float | None, digits: int = 3) -> str:
    """`value` with so many digits after the point; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def spread(values: Sequence[float | None]) -> str:
    """The mean over seeds, and behind it their standard deviation; a dash without a value."""
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    return number(mean(present)) + (f" ± {stdev(present):.3f}" if len(present) > 1 else "")


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    Attributes:
        label: for the legend; lines of one label have one colour and one entry.
        x, y: the points.
        dashed: draw it dashed.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def plot_lines(
    path: Path,
    lines: Sequence[Line],
    *,
    xlabel: str,
    ylabel: str,
    places: Sequence[int] | None = None,
    width: float = 1.5,
    **axes_options: Any,
) -> None:
    """Draw lines into `path`; without lines, nothing.

    Args:
        path: .png, .pdf or .svg.
        lines: what to draw.
        xlabel, ylabel: names of the axes, with units.
        places: numbers to name on a logarithmic horizontal axis; the vertical one then names powers of two.
        width: of the lines, in points.
        **axes_options: other properties of Matplotlib's axes, for instance `xscale="log"`.

    Raises:
        ImportError: Matplotlib is missing; the message has the pip command.
    """
    if not lines:
        return
    colours = {label: f"C{index}" for index, label in enumerate(dict.fromkeys(line.label for line in lines))}
    seen: set[str] = set()
    with picture(path, (8, 5)) as axes:
        for line in lines:
            label = None if line.label in seen else line.label
            seen.add(line.label)
            style = "--" if line.dashed else "-"
            axes.plot(line.x, line.y, style, color=colours[line.label], label=label, linewidth=width)
        finish(axes, xlabel=xlabel, ylabel=ylabel, **axes_options)
        if places is not None:
            powers_of_two(axes, places)
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")


def plot_seeds(
    path: Path,
    rows: Mapping[str, Sequence[Sequence[float | None]]],
    places: Sequence[int],
    *,
    xlabel: str,
    ylabel: str,
    **axes_options: Any,
) -> None:
    """Draw a line for each label, the mean of its seeds, and a dot for every seed, over places on a logarithmic axis.

    Args:
        path: .png, .pdf or .svg.
        rows: by label, a row for each seed; a value for each place, None where it was not measured.
        places: numbers above 0.
        xlabel, ylabel: names of the axes, with units.
        **axes_options: other properties of Matplotlib's axes.

    Raises:
        ImportError: Matplotlib is missing; the message has the pip command.
    """
    with picture(path, (8, 5)) as axes:
        for index, (label, seeds) in enumerate(rows.items()):
            columns = zip(places, zip(*seeds, strict=True), strict=True)
            points = [(place, value) for place, column in columns for value in column if value is not None]
            drawn = sorted({place for place, _ in points})
            means = [mean(value for at, value in points if at == place) for place in drawn]
            axes.plot(drawn, means, color=f"C{index}", label=label, linewidth=1.5)
            axes.plot(*zip(*points, strict=True), "o", color=f"C{index}", markersize=3)
        powers_of_two(axes, places)
        finish(axes, xlabel=xlabel, ylabel=ylabel, **axes_options)
