"""Run tasks with lm_eval at several numbers of examples, and bring out the figures."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lm_eval
from lm_eval.api.metrics import mean, perplexity
from lm_eval.api.model import LM

from polysketch.integrations.lm_eval.tasks import LoadedTask, quiet

__all__ = ["TaskFigure", "evaluate_tasks"]

SEED = 1234
"""The seed of examples that lm_eval itself takes."""


@dataclass(frozen=True)
class TaskFigure:
    """One figure of one task.

    Attributes:
        task: name of the task.
        shots: examples before each question.
        metric: as lm_eval names it: acc, acc_norm, perplexity, exact_match, ..., or the length of texts of RULER.
        value: the figure.
        stderr: its standard error over documents; None where it is not known.
        num_documents: documents scored.
        chance: accuracy of guessing among the choices; None where nothing is chosen.
        higher_is_better: or None where lm_eval does not say.
    """

    task: str
    shots: int
    metric: str
    value: float
    stderr: float | None
    num_documents: int
    chance: float | None
    higher_is_better: bool | None


def evaluate_tasks(
    model: LM, tasks: Sequence[LoadedTask], *, shots: Sequence[int] = (0,), limit: int | None = None, seed: int = SEED
) -> list[TaskFigure]:
    """Score a model on every task at every number of shots.

    The values are lm_eval's. Standard errors are those of a mean; of a perplexity exp(-m), the perplexity times the
    standard error of m, where lm_eval draws samples at random.

    Args:
        model: `PolysketchLM`, or any model class of lm_eval, for instance its HFLM.
        tasks: of `load_tasks`.
        shots: numbers of examples before each question.
        limit: score only the first so many documents of a task.
        seed: of the draw of examples.

    Raises:
        ValueError: a negative number of shots, examples for a task that takes none, or a limit below 1.
    """
    if not shots or min(shots) < 0 or (limit is not None and limit < 1):
        raise ValueError(f"expected --shots of at least 0 and a --limit of at least 1, found {list(shots)} and {limit}")
    for loaded in tasks:
        if max(shots) > 0 and not loaded.examples_from:
            raise ValueError(
                f"{loaded.name}: expected --shots 0, found {max(shots)}: examples would make its texts longer"
            )
    return [figure for number in shots for figure in _evaluate(model, tasks, number, limit, seed)]


def _evaluate(model: LM, tasks: Sequence[LoadedTask], shots: int, limit: int | None, seed: int) -> list[TaskFigure]:
    """All tasks at one number of shots."""
    for loaded in tasks:
        loaded.task.set_config("num_fewshot", shots)
        loaded.task.set_fewshot_seed(seed)
    by_place = {str(place): loaded for place, loaded in enumerate(tasks)}  # a name may be there at several lengths
    with quiet():
        results: Any = lm_eval.evaluate(
            lm=model,
            task_dict={"tasks": {place: loaded.task for place, loaded in by_place.items()}},
            limit=limit,
            bootstrap_iters=0,
            log_samples=True,
        )
    return [
        figure
        for place, loaded in by_place.items()
        for figure in _figures(loaded.name, shots, loaded.task, results["results"][place], results["samples"][place])
    ]


def _figures(
    name: str, shots: int, task: Any, values: dict[str, Any], samples: list[dict[str, Any]]
) -> list[TaskFigure]:
    """The figures of one task."""
    figures = []
    for key, value in values.items():
        metric, comma, rule = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        scored = [sample[metric] for sample in samples if sample["filter"] == rule and metric in sample]
        figures.append(
            TaskFigure(
                task=name,
                shots=shots,
                metric=metric,
                value=float(value),
                stderr=_stderr(task.aggregation().get(metric), scored, value),
                num_documents=len(scored),
                chance=_chance(task) if metric.startswith("acc") and task.OUTPUT_TYPE == "multiple_choice" else None,
                higher_is_better=task.higher_is_better().get(metric),
            )
        )
    return figures


def _stderr(aggregation: Any, scored: list[Any], value: float) -> float | None:
    """The standard error of a mean or a perplexity."""
    if len(scored) < 2 or aggregation not in (mean, perplexity):
        return None
    error = statistics.stdev(map(float, scored)) / math.sqrt(len(scored))
    return error * value if aggregation is perplexity else error


def _chance(task: Any) -> float:
    """The mean over documents of one in the number of choices."""
    choices = Counter(instance.doc_id for instance in task.instances)
    return statistics.mean(1 / count for count in choices.values())
