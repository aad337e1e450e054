"""loss.png: the loss of a run against its steps."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SMOOTHED = 20


def plot_loss(lines: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw training and validation loss of the metrics `lines` into `path`.

    Returns:
        Whether a plot was made: False when Matplotlib is not installed or there is nothing to draw.
    """
    training = _points(lines, "train")
    if importlib.util.find_spec("matplotlib") is None or not training:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    axes.plot(*zip(*training, strict=True), color="C0", alpha=0.3, linewidth=0.8, label="training")
    axes.plot(*zip(*_running_mean(training), strict=True), color="C0", label=f"training, mean of {_SMOOTHED} lines")
    if validation := _points(lines, "evaluation"):
        axes.plot(*zip(*validation, strict=True), "o-", color="C1", markersize=3, label="validation")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return True


def _points(lines: Sequence[Mapping[str, Any]], kind: str) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines if line.get("kind") == kind and line.get("loss") is not None]


def _running_mean(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    def mean(index: int) -> float:
        window = [loss for _, loss in points[max(0, index - _SMOOTHED + 1) : index + 1]]
        return sum(window) / len(window)

    return [(step, mean(index)) for index, (step, _) in enumerate(points)]
