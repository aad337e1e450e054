"""Plots of what `polysketch evaluate` measures."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polysketch.evaluation import ContextLosses, Evaluation
from polysketch.plotting import finish, loss_by_position, picture, powers_of_two

__all__ = ["plot_contexts", "plot_grid", "plot_loss_by_position"]

_DARK = 0.55
"""Shares above this have a dark background, on which figures are white."""


def plot_loss_by_position(result: Evaluation, file: Path, *, title: str) -> None:
    """Write a plot of the mean loss of every bucket against the position in the context, on a logarithmic axis."""
    with _announced(file, (7, 4)) as axes:
        axes.stairs(result.loss_by_position, result.position_edges, baseline=None, linewidth=2)
        loss_by_position(axes, result.position_edges.tolist(), title=title, legend=False)


def plot_contexts(result: ContextLosses, file: Path, *, title: str, trained: int | None) -> None:
    """Write perplexity against the length of the context, both on logarithmic axes."""
    late = np.exp(np.minimum(result.late_loss, 700))
    with _announced(file, (7, 4)) as axes:
        style = {"marker": "o", "linewidth": 2}
        axes.plot(result.contexts, result.perplexity, label="cut into windows", **style)
        axes.plot(result.contexts, late, linestyle="--", label="with at least half of the context", **style)
        if trained is not None:
            axes.axvline(trained, color="grey", linewidth=1, label=f"context of training ({trained:,})")
        powers_of_two(axes, result.contexts)
        finish(axes, xlabel="context (tokens)", ylabel="perplexity", title=title)


def plot_grid(
    shares: np.ndarray,
    file: Path,
    *,
    title: str,
    rows: tuple[str, Sequence[str]],
    columns: tuple[str, Sequence[str]],
) -> None:
    """Write a heat map of shares from 0 to 1, the figure in every cell.

    Args:
        shares: (rows, columns).
        file: to write.
        title: over the plot.
        rows: name of the vertical axis, and of every row from the top.
        columns: name of the horizontal axis, and of every column.
    """
    size = (max(4.5, 1.5 + 0.9 * shares.shape[1]), max(3.0, 1.4 + 0.55 * shares.shape[0]))
    with _announced(file, size) as axes:
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            colour = "white" if share > _DARK else "black"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=colour)
        axes.set_yticks(range(shares.shape[0]), list(rows[1]))
        axes.set_xticks(range(shares.shape[1]), list(columns[1]))
        axes.set(xlabel=columns[0], ylabel=rows[0])
        axes.set_title(title, fontsize="medium")
        axes.figure.colorbar(image, ax=axes, label="share right")


@contextlib.contextmanager
def _announced(file: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Axes of a picture; when it is written, it is said where it is."""
    with picture(file, size) as axes:
        yield axes
    print(f"plot: {file}")
