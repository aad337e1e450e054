"""Perplexity, and time, against the number of replaced layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polysketch.plotting import finish, picture, whole_numbers

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
    layers = [row["layers"] for row in rows]
    with picture(path, (11.0, 4.2), columns=2, title=title, dpi=120) as ((left, right),):
        left.plot(layers, [row["perplexity"] for row in rows], "o-")
        right.plot(layers, [row["attention_seconds"] for row in rows], "o-", label="attention of all layers")
        right.plot(layers, [row["forward_seconds"] for row in rows], "s--", label="whole forward pass")
        right.set_ylim(bottom=0)
        along = f"layers replaced by {attention}, the last first"
        finish(left, legend=False, xlabel=along, ylabel="perplexity", title="perplexity")
        finish(right, xlabel=along, ylabel="seconds a window", title="time")
        whole_numbers(left)
        whole_numbers(right)
