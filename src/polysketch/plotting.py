"""Pictures: the one place that knows Matplotlib, and what all plots have in common."""

import contextlib
import importlib.util
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polysketch.extras import require
from polysketch.storage import disk

__all__ = ["SUFFIXES", "finish", "is_installed", "loss_by_position", "picture", "powers_of_two", "whole_numbers"]

SUFFIXES = (".png", ".pdf", ".svg")
"""Endings of files that a picture can be written to."""

_MANY = 10  # entries of a legend; more of them cover a third of the axes


def is_installed() -> bool:
    """Whether Matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def picture(
    file: Path, size: tuple[float, float] = (7, 4), *, rows: int = 1, columns: int = 1, title: str = "", dpi: int = 150
) -> Iterator[Any]:
    """Axes to draw into; at the end, unless something was raised, they are written to `file`, whole or not at all.

    Args:
        file: its suffix gives the format.
        size: width and height of the picture in inches.
        rows, columns: of axes.
        title: of the whole picture.
        dpi: dots per inch.

    Yields:
        The axes, where there are several an array (rows, columns) of them.

    Raises:
        ImportError: Matplotlib is missing; the message has the pip command.
    """
    figure = require("matplotlib.figure").Figure(figsize=size, layout="constrained")
    yield figure.subplots(rows, columns, squeeze=rows == columns == 1)
    if title:
        figure.suptitle(title, fontsize=9)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=file.suffix.removeprefix("."), dpi=dpi)
    disk.replace_file(file, drawn.getvalue())


def finish(axes: Any, *, legend: bool = True, **options: Any) -> None:
    """Grid lines, a small legend, and other properties of the axes: labels with units, limits, scales.

    A long legend stands beside the axes, where it hides no line.
    """
    axes.set(**options)
    axes.grid(alpha=0.3)
    if legend:
        long = len(axes.get_legend_handles_labels()[1]) > _MANY
        axes.legend(fontsize="small", **({"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if long else {}))


def powers_of_two(axes: Any, places: Sequence[int]) -> None:
    """A logarithmic horizontal axis with these places named and no others."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(require("matplotlib.ticker").NullLocator())
    axes.set_xticks(places, [f"{place:,}" for place in places])


def whole_numbers(axes: Any) -> None:
    """A horizontal axis on which only whole numbers are named."""
    axes.xaxis.set_major_locator(require("matplotlib.ticker").MaxNLocator(integer=True))


def loss_by_position(axes: Any, edges: Sequence[int], **options: Any) -> None:
    """The axes of losses of buckets of positions, the bucket that begins at 0 included.

    Args:
        axes: holds a line for each loss, drawn by `stairs`.
        edges: of the buckets, one more than there are.
        **options: as for `finish`.
    """
    edges = [int(edge) for edge in edges]
    axes.set_xscale("symlog", base=2, linthresh=max(1, edges[1]))
    axes.set_xticks(edges, [f"{edge:,}" for edge in edges], rotation=45 if len(edges) > 8 else 0)
    labels = {"xlabel": "position in the context (tokens)", "ylabel": "loss (nats per token)"}
    finish(axes, **{"xlim": (0, edges[-1]), **labels, **options})
