"""Accuracy on associative recall: does the model answer a key with the value it was paired with?"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polysketch.data.recall import recall_batch
from polysketch.models import TransformerLM
from polysketch.models.modes import evaluation_mode
from polysketch.targets import NO_TARGET

__all__ = ["RecallResult", "recall_accuracy", "recall_grid"]


def recall_accuracy(model: TransformerLM, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the share of queries whose most probable next token is their label.

    Logits are computed at the queries alone, so memory does not grow with length times vocabulary.

    Args:
        model: a language model; its training mode is restored.
        batches: pairs (ids, labels), both int64 (batch, length), for instance of `data.recall.recall_batch`. The label
            of position i is the token that should follow position i; -100 where nothing is asked.

    Raises:
        ValueError: ids and labels differ in shape, or no position of any batch has a label.
    """
    device = next(model.parameters()).device
    num_right = num_asked = 0
    with evaluation_mode(model), torch.inference_mode():
        for ids, labels in batches:
            right, asked = _count_right(model, ids.to(device), labels.to(device))
            num_right, num_asked = num_right + right, num_asked + asked
    if num_asked == 0:
        raise ValueError(f"expected at least one labelled position, found none: all labels are {NO_TARGET}")
    return num_right / num_asked


@dataclass(frozen=True)
class RecallResult:
    """What `recall_grid` measured.

    Attributes:
        pairs: numbers of pairs of a key and a value.
        gaps: least number of positions from the last pair's value to the first query.
        accuracy: float64, (pairs, gaps): share of queries whose most probable next token is their value.
        chance: accuracy of who knows no more than that answers are values: one in the number of values there are.
        num_queries: int64, (pairs,): queries behind each accuracy.
    """

    pairs: list[int]
    gaps: list[int]
    accuracy: np.ndarray
    chance: float
    num_queries: np.ndarray


def recall_grid(
    model: TransformerLM,
    *,
    pairs: Sequence[int],
    gaps: Sequence[int],
    vocab_size: int | None = None,
    num_batches: int = 4,
    batch_size: int = 8,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> RecallResult:
    """Multi-query associative recall over numbers of pairs and gaps between the pairs and their queries.

    A sequence holds K pairs, then nothing for `gap` positions, then the K keys among as many empty slots
    (`data.recall.recall_batch`): 6 K + gap positions, read at once.

    Args:
        model: a language model; one that was not trained on the task answers by copying, or not at all.
        pairs: values of K.
        gaps: least numbers of positions from the last pair's value to a query.
        vocab_size: ids that keys and values are drawn from, keys from its lower half. Default: the model's.
        num_batches: batches at every number of pairs and gap.
        batch_size: sequences of a batch.
        seed: of the sequences.
        on_progress: called as (cells done, cells in all).

    Raises:
        ValueError: no pairs or gaps, or pairs that the vocabulary cannot hold.
    """
    if not pairs or not gaps or min(gaps) < 0 or num_batches < 1:
        raise ValueError("expected at least one number of pairs, one gap of at least 0 and one batch")
    vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
    accuracy = np.zeros((len(pairs), len(gaps)))
    for row, num_pairs in enumerate(pairs):
        for column, gap in enumerate(gaps):
            empty = gap + gap % 2  # slots are of two positions
            batches = [
                recall_batch(
                    batch_size,
                    length=6 * num_pairs + empty,
                    num_pairs=num_pairs,
                    vocab_size=vocab_size,
                    seed=seed,
                    index=index,
                    minimum_gap=empty,
                )
                for index in range(num_batches)
            ]
            accuracy[row, column] = recall_accuracy(model, batches)
            if on_progress is not None:
                on_progress(row * len(gaps) + column + 1, accuracy.size)
    num_queries = np.array(pairs, dtype=np.int64) * num_batches * batch_size
    return RecallResult(list(pairs), list(gaps), accuracy, 1 / (vocab_size - vocab_size // 2), num_queries)


def _count_right(model: TransformerLM, ids: Tensor, labels: Tensor) -> tuple[int, int]:
    """Return (queries answered correctly, queries) of one batch."""
    if ids.shape != labels.shape:
        raise ValueError(f"expected labels of shape {tuple(ids.shape)} like the ids, found {tuple(labels.shape)}")
    asked = labels != NO_TARGET
    hidden = model.hidden_states(ids)[asked]
    answers = torch.argmax(model.logits(hidden.unsqueeze(0)).squeeze(0), dim=-1)
    return int((answers == labels[asked]).sum()), int(asked.sum())
