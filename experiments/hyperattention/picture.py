"""Perplexity, and time, against the number of replaced layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot_patching"]


def plot_patching(rows: Sequence[Mapping[str, Any]], attention: str, title: str, path: Path) -> None:
    """Draw two panels into `path`: perplexity on the left, seconds of attention and of the forward pass on the right.

    Args:
        rows: of `measure_patching`.
        attention: the mechanism's name.
        title: of the whole picture.
        path: its suffix (.png, .pdf, .svg) gives the format.

    Raises:
        ValueError: nothing to draw.
        ImportError: no matplotlib; it comes with the extra `plot`.
    """
    if not rows:
        raise ValueError("expected measurements to plot, found none")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    layers = [row["layers"] for row in rows]
    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(layers, [row["perplexity"] for row in rows], "o-")
    left.set(ylabel="perplexity", title="perplexity")
    right.plot(layers, [row["attention_seconds"] for row in rows], "o-", label="attention of all layers")
    right.plot(layers, [row["forward_seconds"] for row in rows], "s--", label="whole forward pass")
    right.set(ylabel="seconds a window", title="time")
    right.set_ylim(bottom=0)
    right.legend()
    for axes in (left, right):
        axes.set_xlabel(f"layers replaced by {attention}, the last first")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
