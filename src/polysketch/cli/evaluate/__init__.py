"""`polysketch evaluate MODEL`: how well a model predicts held-out text, answers tasks, and uses what is far away."""

import dataclasses
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from polysketch.cli.evaluate.flags import EvaluateFlags
from polysketch.cli.output_files import check_folder, check_plot

__all__ = ["EvaluateFlags", "run"]


def run(flags: EvaluateFlags) -> int:
    """Evaluate as the flags say, print the figures, and return the exit status."""
    if not flags.download:  # before anything is imported that asks the Hub
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    asked = _asked(flags)
    check_plot(flags.plot)
    check_folder(flags.out, "--out")
    figures = _measure_task(asked, flags) if _check_folders(flags) else _measure(asked, flags)
    if flags.out is not None:
        report = {"figures": figures, "settings": _settings(flags), "versions": _versions()}
        from polysketch.benchmarking.workbench import save

        save(report, flags.out)
        print(f"figures: {flags.out}")
    if flags.json:
        print(json.dumps(figures, allow_nan=False))
    return 0


def _asked(flags: EvaluateFlags) -> str | None:
    """The flag that says what to measure; None for the loss on held-out text.

    Raises:
        ValueError: several of them, or a plot of what has none.
    """
    wanted = {
        "--tasks": flags.tasks is not None,
        "--contexts": flags.contexts is not None,
        "--needle": flags.needle,
        "--recall": flags.recall,
    }
    chosen = [flag for flag, given in wanted.items() if given]
    if len(chosen) > 1:
        raise ValueError(f"expected one of {', '.join(wanted)} at a time, found {' and '.join(chosen)}")
    if chosen == ["--tasks"] and flags.plot is not None:
        raise ValueError("expected no --plot with --tasks, found one: figures of tasks are a table")
    asked = chosen[0] if chosen else None
    _refuse_idle(asked, flags)
    return asked


_READ_BY: dict[str, tuple[str | None, ...]] = {
    "context": (None,),
    **dict.fromkeys(("shots", "task_data", "limit", "max_length", "download"), ("--tasks",)),
    "lengths": ("--needle", "--tasks"),
    "depths": ("--needle",),
    "trials": ("--needle", "--recall"),
    "pairs": ("--recall",),
    "gaps": ("--recall",),
}
"""Which measurements read a flag; None for the loss on held-out text."""


def _refuse_idle(asked: str | None, flags: EvaluateFlags) -> None:
    """Refuse what the measurement would not read: its figures would look like what was asked for."""
    for field in dataclasses.fields(flags):
        read_by = _READ_BY.get(field.name, (asked,))
        if asked in read_by or getattr(flags, field.name) == field.default:
            continue
        with_others = " or ".join(map(str, filter(None, read_by)))
        wanted = f"with {with_others}" if with_others else "without --tasks, --contexts, --needle and --recall"
        raise ValueError(
            f"expected --{field.name.replace('_', '-')} {wanted}, found it {f'with {asked}' if asked else 'alone'}"
        )


def _check_folders(flags: EvaluateFlags) -> bool:
    """Refuse a model or text that is not there before PyTorch is loaded; returns whether a task was learned."""
    from polysketch.data.prepared import require_data
    from polysketch.integrations.transformers_folder import is_transformers_folder, require_model
    from polysketch.tasks import is_task, read_task_description
    from polysketch.training.run_folder import find_run, task_of_run

    if is_transformers_folder(flags.run):
        require_model(flags.run)
    elif task_of_run(saved := find_run(flags.run, flags.checkpoint)[0]) is not None:
        if flags.data is not None:
            of_text = saved["training"].get("objective") == "masked" and not is_task(flags.data)
            (require_data if of_text else read_task_description)(flags.data)
        return True
    if flags.data is not None:
        require_data(flags.data)
    return False


def _measure_task(asked: str | None, flags: EvaluateFlags) -> dict[str, Any]:
    """What a run that learned a task can be asked: the task's own questions."""
    others = (field for field in dataclasses.fields(flags) if field.name not in _OF_TASKS)
    given = (f"--{field.name.replace('_', '-')}" for field in others if getattr(flags, field.name) != field.default)
    if found := asked or next(given, None):
        raise ValueError(f"{found}: expected a run that learned text, found {flags.run}, which learned a task")
    from polysketch.cli.evaluate.answers import measure_task

    return measure_task(flags)


_OF_TASKS = ("run", "data", "split", "checkpoint", "batch_size", "max_tokens", "device", "json", "out")
"""Flags that say something about a run that learned a task."""


def _measure(asked: str | None, flags: EvaluateFlags) -> dict[str, Any]:
    """Load what measures that, then the model; measure and print."""
    from polysketch.cli.evaluate.evaluated_model import open_model
    from polysketch.cli.evaluate.held_out import measure_loss
    from polysketch.cli.evaluate.questions import measure_tasks
    from polysketch.cli.evaluate.reach import measure_contexts, measure_needle, measure_recall

    measures = {
        None: measure_loss,
        "--tasks": measure_tasks,
        "--contexts": measure_contexts,
        "--needle": measure_needle,
        "--recall": measure_recall,
    }
    return measures[asked](open_model(flags.run, device=flags.device, checkpoint=flags.checkpoint), flags)


def _settings(flags: EvaluateFlags) -> dict[str, Any]:
    """The flags, for a reader of the figures."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(flags).items()}


def _versions() -> dict[str, str]:
    """What the figures may depend on."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("polysketch", "transformers", "lm_eval", "datasets", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
