"""How many of a task's questions a model answers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from polysketch.models.modes import evaluation_mode
from polysketch.targets import NO_TARGET
from polysketch.tasks import TaskBatch


@dataclass(frozen=True)
class AnswersResult:
    """What `measure_answers` found.

    Attributes:
        loss: mean cross-entropy of the answers, in nats.
        accuracy: share of answers that are the most probable ones.
        whole_rows: share of rows with every answer right.
        answers, rows: how many there were.
    """

    loss: float
    accuracy: float
    whole_rows: float
    answers: int
    rows: int


@torch.no_grad()
def measure_answers(model: Any, batches: Iterable[TaskBatch]) -> AnswersResult:
    """Ask a model all questions of some batches. Of a sequence that is written, each token is asked for after the right
    ones before it.

    Args:
        model: one of `polysketch.models` that learns what the task asks; its training mode is restored.
        batches: for instance `task.held_out("test", 32, 1_000)`.

    Raises:
        ValueError: no row.
    """
    device = next(model.parameters()).device
    loss, right, answers, whole, rows = 0.0, 0, 0, 0, 0
    with evaluation_mode(model):
        for batch in (batch.to(device) for batch in batches):
            asked = batch.answers != NO_TARGET
            logits, expected = model.logits_at(asked, **batch.inputs).float(), batch.answers[asked]
            loss += float(F.cross_entropy(logits, expected, reduction="sum"))
            found = logits.argmax(-1) == expected
            of_row = torch.nonzero(asked)[:, 0]
            wrong = torch.zeros(len(batch), device=device).index_add_(0, of_row, (~found).float())
            right, answers = right + int(found.sum()), answers + len(expected)
            whole, rows = whole + int((wrong == 0).sum()), rows + len(batch)
    if not answers:
        raise ValueError("expected at least one row with a question, found none")
    return AnswersResult(loss / answers, right / answers, whole / rows, answers, rows)
