"""Multiple choice in a file of one's own: `{"question": ..., "choices": [...], "answer": 0}`, one object a line."""

from pathlib import Path
from typing import Any

from polysketch.integrations.lm_eval.fewshot import QUESTION, OtherQuestions
from polysketch.integrations.lm_eval.files import read_documents
from polysketch.integrations.lm_eval.layouts import require_choice, require_fields

__all__ = ["choices_config", "read_questions"]

_SPLIT = "test"


def choices_config(name: str, *, train: bool) -> dict[str, Any]:
    """The configuration of an lm_eval task for documents of `read_questions`.

    The prompt is that of ARC: "Question: ", the question, "\\nAnswer:"; every choice follows after a space. `acc` takes
    the most probable choice, `acc_norm` the most probable per character.

    Args:
        name: what to call the task.
        train: whether there is a split `train` to draw examples from; else they are other questions of the same file.
    """
    metrics = [{"metric": each, "aggregation": "mean", "higher_is_better": True} for each in ("acc", "acc_norm")]
    own_examples = {"fewshot_config": {"sampler": OtherQuestions, "split": _SPLIT}}
    return {
        "task": name,
        "test_split": _SPLIT,
        "output_type": "multiple_choice",
        "doc_to_text": "prompt",  # the name of a field, so that braces in a question are not read as a template
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "metric_list": metrics,
        "metadata": {"version": 1.0},
    } | ({"training_split": "train", "fewshot_split": "train"} if train else own_examples)


def read_questions(file: Path) -> list[dict[str, Any]]:
    """The questions of a file, as documents.

    Raises:
        ValueError: a line that is no question, with its number: no object, a field that is missing or of another kind,
            fewer than two choices, two that are equal or an empty one, or an answer that is none of them.
    """
    documents = []
    for place, line in read_documents(file):
        try:
            documents.append(_document(line))
        except ValueError as error:
            raise ValueError(f"{place} of {file}: {error}") from None
    return documents


def _document(line: dict[str, Any]) -> dict[str, Any]:
    """A line, checked; what else it holds is left out."""
    require_fields(line, "question", "choices", "answer")
    question, choices = line["question"], line["choices"]
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"expected text as `question`, found {question!r}")
    if not isinstance(choices, list) or not all(isinstance(each, str) and each.strip() for each in choices):
        raise ValueError(f"expected texts, none of them empty, as `choices`, found {choices!r}")
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise ValueError(f"expected at least two choices, each another, found {choices!r}")
    answer = require_choice(line["answer"], len(choices), "answer")
    return {"prompt": f"Question: {question}\nAnswer:", "choices": choices, "answer": answer, QUESTION: question}
