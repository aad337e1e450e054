"""Accuracy on associative recall: does the model answer a key with the value it was paired with?"""

from collections.abc import Iterable

import torch
from torch import Tensor

from polysketch.evaluation.losses import evaluation_mode
from polysketch.models import TransformerLM

__all__ = ["IGNORED_LABEL", "recall_accuracy"]

IGNORED_LABEL = -100
"""The label of a position that asks nothing."""


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
    with evaluation_mode(model):
        for ids, labels in batches:
            right, asked = _count_right(model, ids.to(device), labels.to(device))
            num_right, num_asked = num_right + right, num_asked + asked
    if num_asked == 0:
        raise ValueError(f"expected at least one labelled position, found none: all labels are {IGNORED_LABEL}")
    return num_right / num_asked


def _count_right(model: TransformerLM, ids: Tensor, labels: Tensor) -> tuple[int, int]:
    """Return (queries answered correctly, queries) of one batch."""
    if ids.shape != labels.shape:
        raise ValueError(f"expected labels of shape {tuple(ids.shape)} like the ids, found {tuple(labels.shape)}")
    asked = labels != IGNORED_LABEL
    hidden = model.hidden_states(ids)[asked]
    answers = torch.argmax(model.logits(hidden.unsqueeze(0)).squeeze(0), dim=-1)
    return int((answers == labels[asked]).sum()), int(asked.sum())
