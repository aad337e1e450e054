"""`polysketch evaluate RUN` of a run that learned a task: how many of its questions the model answers."""

import dataclasses
import sys
from typing import Any

from polysketch.cli.evaluate.flags import EvaluateFlags
from polysketch.evaluation import measure_answers
from polysketch.ops.arguments import check_at_least_one
from polysketch.training.environment import resolve_device
from polysketch.training.learned import learned_task, task_options
from polysketch.training.loading import RunDescription, load_answering_model

__all__ = ["measure_task"]

_ROWS = 1_000  # of a task without end


def measure_task(flags: EvaluateFlags) -> dict[str, Any]:
    """Measure, print a table, and return the figures.

    Raises:
        FileNotFoundError: no run, or no task where it is looked for.
        ValueError: a task of other sizes of vocabulary, answers or pictures than the model's, of other classes, or
            without the split.
    """
    check_at_least_one(**{"--batch-size": flags.batch_size})
    if flags.max_tokens is not None:
        check_at_least_one(**{"--max-tokens": flags.max_tokens})
    model, sizes, run = load_answering_model(
        flags.run, device=resolve_device(flags.device), checkpoint=flags.checkpoint
    )
    task = learned_task(run, flags.data)
    _check_fits(sizes, task, flags)
    _check_classes(run, task)
    _check_learned(run, task)
    limit = sys.maxsize if task.num_rows(flags.split) is not None else _ROWS
    if flags.max_tokens is not None:
        limit = max(1, flags.max_tokens // task.longest)
    found = measure_answers(model, task.held_out(flags.split, flags.batch_size, limit))
    print(f"{flags.run} after {run.step:,} steps, {flags.split}, rows of up to {task.longest:,} tokens")
    print(f"  rows            {found.rows:>12,}")
    print(f"  answers         {found.answers:>12,}")
    print(f"  loss            {found.loss:>12.6f} nats an answer")
    print(f"  accuracy        {100 * found.accuracy:>12.2f} %")
    if found.rows != found.answers:
        print(f"  whole rows      {100 * found.whole_rows:>12.2f} %")
    return {"step": run.step, "split": flags.split, "task": task.name, **dataclasses.asdict(found)}


def _check_fits(sizes: Any, task: Any, flags: EvaluateFlags) -> None:
    if (task.asks, task.vocab_size, task.num_classes) != (sizes.asks, sizes.vocab_size, sizes.num_classes):
        raise ValueError(
            f"--data: expected a task that asks {sizes.asks!r} with {sizes.vocab_size} ids and {sizes.num_classes} "
            f"classes, as the model was trained on, found {task.asks!r}, {task.vocab_size} and {task.num_classes}"
        )
    if (found := _grid(task)) != (expected := _grid(sizes.sizes)):
        raise ValueError(f"--data: expected {expected}, as the model was trained on, found {found}")
    if task.num_rows(flags.split) == 0:
        raise ValueError(f"--split {flags.split}: expected rows of it, found none in the task: choose another")


def _grid(sizes: Any) -> str:
    """The size of pictures and of their patches, of a task or of a model."""
    image = getattr(sizes, "image_size", None)
    if image is None:
        return "no pictures in patches"
    return f"pictures of {' x '.join(map(str, image))} in patches of {sizes.patch_size}"


def _check_classes(run: RunDescription, task: Any) -> None:
    """Refuse other names of classes, or the same ones in another order: the model knows them by number alone."""
    expected, found = task_options(run).get("class_names", ()), getattr(task, "class_names", ())
    if expected and found and list(expected) != list(found):
        raise ValueError(
            f"--data: expected the classes that the run learned, in their order, {', '.join(map(str, expected))}, "
            f"found {', '.join(map(str, found))}: make the task from files of the same classes, by the version that "
            "made the run's"
        )


def _check_learned(run: RunDescription, task: Any) -> None:
    """Refuse what the model has had no way to learn: other values of keys, or ids of another kind."""
    known = task_options(run)
    for name in getattr(task, "learned", ()):
        if name in known and known[name] != (found := task.options()[name]):
            raise ValueError(f"--data: expected {name} {known[name]}, as the run learned {task.name}, found {found}")
