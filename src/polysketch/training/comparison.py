"""Runs side by side: a table of what each is and how far it came, and a plot of their validation losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polysketch import plotting
from polysketch.progress import format_seconds
from polysketch.training.options import PACKED_BEFORE, flag
from polysketch.training.run_folder import RunFolder

_MEASURED = {"context": None, "eval_tokens": None, "validation": PACKED_BEFORE, "mask_share": None, "seed": None}
"""Options that decide what a validation loss means, with what runs have that do not say."""


@dataclass(frozen=True)
class ComparedRun:
    """What a run says of itself.

    Attributes:
        folder: where it is, as it was named.
        mechanism: its attention; with options where some differ from the defaults.
        data: digest of the data's description: losses of other data mean other things.
        steps: made, and asked for.
        tokens: trained on.
        seconds: of training.
        validation: (step, loss in nats) of each evaluation.
        objective: what was learned: auto, the next token or the task's answer; or masked.
        measured: how losses are measured, by the name of the option.
    """

    folder: Path
    mechanism: str
    data: str
    steps: tuple[int, int]
    tokens: int
    seconds: float
    validation: Sequence[tuple[int, float]]
    objective: str
    measured: Mapping[str, Any]


def compared(folder: Path) -> ComparedRun:
    """Read what a run says of itself; its weights are not looked at.

    Raises:
        FileNotFoundError: it is no run.
        ValueError: it is damaged, or made no step.
    """
    place = RunFolder(folder)
    config = place.read_config()
    lines = place.open_metrics().read()
    training = [line for line in lines if line["kind"] == "train" and {"tokens", "seconds"} <= _said(line)]
    if not training:
        raise ValueError(f"expected a run with a line of metrics, found none in {place.metrics}: let it train first")
    evaluations = [
        (line["step"], line["loss"])
        for line in lines
        if line["kind"] == "evaluation" and "loss" in _said(line)  # a loss that is not finite is none
    ]
    return ComparedRun(
        folder,
        _mechanism(config["model"], place.config),
        config["data"]["description_sha256"],
        (training[-1]["step"], _steps(config["training"], place.config)),
        training[-1]["tokens"],
        training[-1]["seconds"],
        evaluations,
        config["training"].get("objective", "auto"),
        _measured(config["training"]),
    )


def _measured(training: Mapping[str, Any]) -> dict[str, Any]:
    """What `_MEASURED` names; a share of hidden tokens and the seed that chooses them where some are hidden."""
    options = {name: training.get(name, before) for name, before in _MEASURED.items()}
    return options if training.get("objective") == "masked" else {**options, "mask_share": None, "seed": None}


def _said(line: Mapping[str, Any]) -> set[str]:
    """The names of a line that have a value."""
    return {name for name, value in line.items() if value is not None}


def comparison_table(runs: Sequence[ComparedRun]) -> list[str]:
    """Lines of at most 80 columns for short names: best first, by the lowest validation loss."""
    rows = [["run", "attention", "steps", "tokens", "time", "best loss", "last"], *map(_row, sorted(runs, key=_best))]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(_padded(row, widths)).rstrip() for row in rows]


def differences(runs: Sequence[ComparedRun]) -> list[str]:
    """A line for each option by which losses were measured in more than one way."""
    values = {name: {run.folder: run.measured[name] for run in runs} for name in _MEASURED}
    return [
        f"note: losses are of other {flag(name)}: " + ", ".join(f"{value} in {run}" for run, value in found.items())
        for name, found in values.items()
        if len({*found.values()}) > 1
    ]


def plot_comparison(runs: Sequence[ComparedRun], path: Path) -> None:
    """Draw the validation losses over steps.

    Args:
        runs: at least one with an evaluation.
        path: .png, .pdf or .svg.

    Raises:
        ImportError: Matplotlib is missing.
        ValueError: no run was evaluated.
    """
    drawn = [run for run in runs if run.validation]
    if not drawn:
        raise ValueError("expected a run that was evaluated at least once, found none: there is nothing to draw")
    with plotting.picture(path, (7, 4.5)) as axes:
        for run in drawn:
            axes.plot(*zip(*run.validation, strict=True), "o-", markersize=3, label=f"{run.folder} ({run.mechanism})")
        plotting.finish(axes, xlabel="step", ylabel="validation loss (nats per token)")


def _best(run: ComparedRun) -> float:
    return min((loss for _, loss in run.validation), default=float("inf"))


def _steps(training: Mapping[str, Any], origin: Path) -> int:
    steps = training.get("steps")
    if not isinstance(steps, int):
        raise ValueError(f"expected the number of steps of a training run in {origin}, found {str(steps)[:20]}")
    return steps


def _mechanism(model: Mapping[str, Any], origin: Path) -> str:
    sizes = model.get("sizes", model)
    options = (sizes.get("attention_options") or {}) if isinstance(sizes, dict) else None
    if not isinstance(options, dict) or "attention" not in sizes:
        raise ValueError(f"expected a model's attention and its options in {origin}, found other entries")
    told = ", ".join(f"{name}={value}" for name, value in options.items())
    return f"{sizes['attention']} {told}".strip()


def _row(run: ComparedRun) -> list[str]:
    made, asked = run.steps
    best = min(run.validation, key=lambda point: point[1], default=None)
    return [
        str(run.folder),
        run.mechanism,
        f"{made:,}" if made == asked else f"{made:,} of {asked:,}",
        f"{run.tokens:,}",
        format_seconds(run.seconds),
        "-" if best is None else f"{best[1]:.4f} at {best[0]:,}",
        "-" if best is None else f"{run.validation[-1][1]:.4f}",
    ]


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.ljust(width) if index < 2 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
