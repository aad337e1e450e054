"""`polysketch evaluate MODEL --tasks hellaswag,piqa --shots 0,5`: questions with known answers, by lm_eval."""

import dataclasses
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polysketch.cli.comma_separated import numbers
from polysketch.cli.evaluate.evaluated_model import EvaluatedModel
from polysketch.cli.evaluate.flags import EvaluateFlags

if TYPE_CHECKING:
    from polysketch.integrations.lm_eval import LoadedTask, TaskFigure

__all__ = ["measure_tasks"]

_LENGTHS = "4096"
"""Of texts of RULER, as in lm_eval."""


def measure_tasks(evaluated: EvaluatedModel, flags: EvaluateFlags) -> dict[str, Any]:
    """Run the tasks, print a table, and return the figures.

    Raises:
        ValueError: an unknown task (the message lists those that are known), or numbers that are none.
        FileNotFoundError: a task without its file.
        ImportError: the extra `eval` is missing.
    """
    from polysketch.integrations.lm_eval import RulerTexts, evaluate_tasks, load_tasks

    shots = numbers(flags.shots, "--shots", least=0, kind=int)
    lengths = numbers(_LENGTHS if flags.lengths is None else flags.lengths, "--lengths", least=1, kind=int)
    names = [name.strip() for name in (flags.tasks or "").split(",") if name.strip()]
    if not names:
        raise ValueError("--tasks: expected names with commas between, found none")
    texts = RulerTexts(evaluated.tokenizer, lengths, flags.limit)
    tasks = load_tasks(names, _folders(flags.task_data), download=flags.download, ruler=texts)
    if flags.without_prefix:
        evaluated.remove_prefix()
    model = _adapter(evaluated, flags, tasks)
    _say_what_is_read(evaluated, model, tasks)
    figures = evaluate_tasks(model, tasks, shots=shots, limit=flags.limit, seed=flags.seed)
    _print_table(figures, evaluated)
    if max(shots) > 0:
        for loaded in tasks:
            print(f"  examples of {loaded.name}: {loaded.examples_from}")
    return {
        "run": str(flags.run),
        "step": evaluated.step,
        "max_length": getattr(model, "max_length", None),
        "tasks": [_as_json(figure) for figure in figures],
        "sources": {loaded.name: {"documents": loaded.source, "examples": loaded.examples_from} for loaded in tasks},
    }


def _folders(given: Path | None) -> list[Path]:
    """Where the files of tasks are looked for."""
    if given is not None:
        if not given.is_dir():
            raise FileNotFoundError(f"--task-data: expected a folder, found none at {given}")
        return [given]
    outside = os.environ.get("POLYSKETCH_DATA")
    return [Path(outside) / "eval"] if outside else []


def _adapter(evaluated: EvaluatedModel, flags: EvaluateFlags, tasks: list["LoadedTask"]) -> Any:
    """lm_eval's class for models of transformers, or that class with one of ours."""
    from polysketch.integrations.lm_eval import PolysketchLM, room_for, transformers_model

    size, longest = flags.batch_size, flags.max_length
    if evaluated.original is None:
        longest = room_for(tasks) if longest is None else longest
        return PolysketchLM(evaluated.model, tokenizer=evaluated.tokenizer, batch_size=size, max_length=longest)
    return transformers_model(evaluated.original, evaluated.tokenizer, batch_size=size, max_length=longest)


def _say_what_is_read(evaluated: EvaluatedModel, model: Any, tasks: list["LoadedTask"]) -> None:
    """Say so where the model may read more than it was trained with, or less than a task has."""
    trained, longest = evaluated.context_length, getattr(model, "max_length", None)
    if trained is not None and longest is not None and longest > trained:
        print(
            f"inputs of up to {longest} tokens are read whole; the model was trained with {trained} "
            f"(--max-length {trained} would cut them)"
        )
    for loaded in tasks:
        if longest is not None and loaded.room > longest:
            print(
                f"{loaded.name}: questions of up to {loaded.room} tokens with the answer are cut on the left: "
                f"the model reads {longest} (--max-length {loaded.room} would keep them whole)"
            )


def _print_table(figures: list["TaskFigure"], evaluated: EvaluatedModel) -> None:
    """Print the figures for a person."""
    widths = max(len(figure.task) for figure in figures), max(len(figure.metric) for figure in figures)
    print(f"{evaluated.title}")
    print(f"  {'task':<{widths[0]}}  shots  {'metric':<{widths[1]}}  {'value':>12}  {'stderr':>10}  chance  questions")
    for figure in figures:
        stderr = "" if figure.stderr is None else _shown(figure.stderr)
        chance = "" if figure.chance is None else f"{figure.chance:.4f}"
        print(
            f"  {figure.task:<{widths[0]}}  {figure.shots:>5}  {figure.metric:<{widths[1]}}  {_shown(figure.value):>12}"
            f"  {stderr:>10}  {chance:>6}  {figure.num_documents:>9,}"
        )


def _shown(value: float) -> str:
    """Four decimals, as lm_eval has them, unless that is too long."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4e}"


def _as_json(figure: "TaskFigure") -> dict[str, Any]:
    """Return a figure for a program; what JSON cannot hold is null."""
    values = dataclasses.asdict(figure)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
