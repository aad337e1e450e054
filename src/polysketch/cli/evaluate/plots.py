"""Plots of what `polysketch evaluate` measures."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polysketch.evaluation import ContextLosses, Evaluation

__all__ = ["plot_contexts", "plot_grid", "plot_loss_by_position"]

_DARK = 0.55
"""Shares above this have a dark background, on which figures are white."""


def plot_loss_by_position(result: Evaluation, file: Path, *, title: str) -> None:
    """Write a plot of the mean loss of every bucket against the position in the context, on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.stairs(result.loss_by_position, result.position_edges, baseline=None, linewidth=2)
    axes.set_xscale("symlog", base=2, linthresh=max(1, int(result.position_edges[1])))
    axes.set_xlim(0, int(result.position_edges[-1]))
    axes.set_xticks(result.position_edges, [f"{edge:,}" for edge in result.position_edges.tolist()], rotation=45)
    axes.set(xlabel="position in the context (tokens)", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    _save(figure, file)


def plot_contexts(result: ContextLosses, file: Path, *, title: str, trained: int | None) -> None:
    """Write perplexity against the length of the context, both on logarithmic axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(result.contexts, result.perplexity, marker="o", linewidth=2, label="cut into windows")
    late = np.exp(np.minimum(result.late_loss, 700))
    axes.plot(result.contexts, late, marker="o", linewidth=2, linestyle="--", label="with at least half of the context")
    if trained is not None:
        axes.axvline(trained, color="grey", linewidth=1, label=f"context of training ({trained:,})")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(result.contexts, [f"{context:,}" for context in result.contexts])
    axes.set(xlabel="context (tokens)", ylabel="perplexity", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    _save(figure, file)


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
    from matplotlib.figure import Figure

    size = (max(4.5, 1.5 + 0.9 * shares.shape[1]), max(3.0, 1.4 + 0.55 * shares.shape[0]))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        colour = "white" if share > _DARK else "black"
        axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=colour)
    axes.set_yticks(range(shares.shape[0]), list(rows[1]))
    axes.set_xticks(range(shares.shape[1]), list(columns[1]))
    axes.set(xlabel=columns[0], ylabel=rows[0])
    axes.set_title(title, fontsize="medium")
    figure.colorbar(image, ax=axes, label="share right")
    _save(figure, file)


def _save(figure: object, file: Path) -> None:
    """Write a figure and say where it is."""
    figure.savefig(file, dpi=150)  # type: ignore[attr-defined]
    print(f"plot: {file}")
