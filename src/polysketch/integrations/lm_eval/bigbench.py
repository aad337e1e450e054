"""Tasks in BIG-bench's json: prompts by its rules, choices scored by likelihood, other answers generated."""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polysketch.integrations.lm_eval.fewshot import QUESTION, OtherQuestions
from polysketch.integrations.lm_eval.files import read_json

__all__ = ["bigbench_config", "require_bigbench"]

_SPLIT = "test"
_NEW_TOKENS = 64


def require_bigbench(file: Path) -> None:
    """Refuse a .json file that holds no task of BIG-bench: an object with `examples`, each with an `input`.

    Raises:
        ValueError: with what the file holds instead.
    """
    task = read_json(file)
    examples = task.get("examples") if isinstance(task, dict) else None
    if not isinstance(examples, list):
        found = f"one with {', '.join(task) or 'nothing in it'}" if isinstance(task, dict) else type(task).__name__
        raise ValueError(f"expected a task of BIG-bench (an object with a list `examples`) in {file}, found {found}")
    if not examples:
        raise ValueError(f"expected questions in `examples` of {file}, found an empty list: nothing can be scored")
    for number, example in enumerate(examples):
        if not (isinstance(example, dict) and "input" in example):
            found = ", ".join(example) or "nothing" if isinstance(example, dict) else repr(example)
            raise ValueError(f"expected a field `input` in example {number} of {file}, found {found}")


def bigbench_config(file: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The configuration of an lm_eval task, and its documents.

    The prompt is task_prefix, then for each example example_input_prefix ("\\nQ: "), the input, the choices each after
    choice_prefix ("\\n  choice: ") in an order drawn once for each (unless append_choices_to_input is false), and
    example_output_prefix ("\\nA: "), examples apart by few_shot_example_separator ("\\n").

    With `target_scores` the choices are scored: `acc` is the mean score of the most probable choice
    (multiple_choice_grade), `acc_norm` of the most probable per character. Else `target` (one or several) is compared
    with what is generated up to `stop_string` (a line's end): `exact_match`.

    Args:
        file: the json file.
        name: what to call the task.

    Raises:
        ValueError: examples with neither `target_scores` nor `target`, scores of nothing, or fields of other types.
    """
    task = read_json(file)
    scored = all("target_scores" in example for example in task["examples"])
    for number, example in enumerate(task["examples"]):
        if not (example.get("target_scores") if scored else "target" in example):
            raise ValueError(f"expected target_scores or target in example {number} of {file}, found {list(example)}")
    try:
        documents = [_document(task, example, scored) for example in task["examples"]]
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected texts, and scores that are numbers, in {file}, found others: {error}") from error
    shared = {
        "task": name,
        "test_split": _SPLIT,
        "fewshot_config": {"sampler": OtherQuestions, "split": _SPLIT},
        "doc_to_text": "prompt",
        "description": "task_prefix",
        "target_delimiter": "",
        "fewshot_delimiter": task.get("few_shot_example_separator", "\n"),
        "metadata": {"version": 1.0},
    }
    return shared | (_choosing() if scored else _generating(task)), documents


def _choosing() -> dict[str, Any]:
    """The part of the configuration for choices."""
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    return {
        "output_type": "multiple_choice",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "process_results": _grade_choices,
        "metric_list": metrics,
    }


def _generating(task: dict[str, Any]) -> dict[str, Any]:
    """The part of the configuration for generated answers."""
    stop = task.get("stop_string") or "\n"
    return {
        "output_type": "generate_until",
        "doc_to_target": "targets",
        "generation_kwargs": {"until": [stop], "do_sample": False, "max_gen_toks": _NEW_TOKENS},
        "process_results": _grader(task.get("output_regex")),
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def _document(task: dict[str, Any], example: dict[str, Any], scored: bool) -> dict[str, Any]:
    """A document: the prompt, and what is right."""
    choices = list(example["target_scores"]) if scored else []
    shown = _shuffled(choices) if task.get("append_choices_to_input", True) else []
    lines = "".join(task.get("choice_prefix", "\n  choice: ") + choice for choice in shown)
    prefix, suffix = task.get("example_input_prefix", "\nQ: "), task.get("example_output_prefix", "\nA: ")
    document = {
        "prompt": f"{prefix}{example['input']}{lines}{suffix}",
        "task_prefix": task.get("task_prefix", ""),
        QUESTION: example["input"],
    }
    if scored:
        scores = [float(score) for score in example["target_scores"].values()]
        return document | {"choices": choices, "scores": scores, "gold": int(np.argmax(scores))}
    target = example["target"]
    return document | {"targets": [target] if isinstance(target, str) else list(target)}


def _shuffled(choices: Sequence[str]) -> list[str]:
    """An order that depends on the choices alone: in the file the right one may always be first."""
    order = sorted(choices)
    random.Random("\n".join(order)).shuffle(order)
    return order


def _grade_choices(document: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """The scores of the most probable choice, and of the most probable per character."""
    values = np.array([value for value, _ in results])
    lengths = np.array([float(len(choice)) for choice in document["choices"]])
    scores = document["scores"]
    return {"acc": scores[int(np.argmax(values))], "acc_norm": scores[int(np.argmax(values / lengths))]}


def _grader(pattern: str | None) -> Callable[[dict[str, Any], Sequence[str]], dict[str, float]]:
    """What compares a generated answer with the targets."""

    def grade(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
        found = re.search(pattern, results[0]) if pattern else None
        answer = found.group() if found else results[0]
        return {"exact_match": float(answer.strip() in [target.strip() for target in document["targets"]])}

    return grade
