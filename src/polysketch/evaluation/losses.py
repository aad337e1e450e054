"""The loss at every position of a context, in memory that does not grow with the context."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from polysketch.data.tokens import Tokens
from polysketch.evaluation.reading import hidden_in_spans
from polysketch.evaluation.windows import window_batches
from polysketch.models import TransformerLM
from polysketch.models.modes import evaluation_mode

__all__ = ["PositionLosses", "Sharing", "added_up", "sum_losses"]


class Sharing(Protocol):
    """Several processes, this one among them, that evaluate one model together, each some of the windows."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def count(self) -> int:
        """Number of processes."""

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of the tensors of all processes."""


@dataclass(frozen=True)
class PositionLosses:
    """Losses in nats summed over windows, position by position.

    Attributes:
        sums: float64, (positions,): the summed loss of the predictions made from that position of a window.
        counts: int64, (positions,): how many predictions were summed; never zero.
        num_bytes: bytes of text that the predicted tokens stand for, or None when no `token_bytes` were given.
    """

    sums: np.ndarray
    counts: np.ndarray
    num_bytes: int | None


def sum_losses(
    model: TransformerLM,
    tokens: Tokens,
    *,
    context_length: int,
    span: int,
    batch_size: int,
    token_bytes: np.ndarray | None,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None,
    sharing: Sharing | None = None,
) -> PositionLosses:
    """Return the losses of every token of `tokens` but the first, summed by position in its window.

    A window is read `span` tokens at a time with the model's state carried along, so memory depends on
    batch_size * span and the size of the state; of the context only 16 bytes per position are kept. Where a mechanism
    estimates what its state would tell exactly, a window is read at once, for the estimate is what is asked about.
    """
    num_predicted = len(tokens) - 1
    sums = np.zeros(min(context_length, num_predicted), dtype=np.float64)
    counts = np.zeros(len(sums), dtype=np.int64)
    num_bytes = 0
    vocab_size = model.config.vocab_size if token_bytes is None else len(token_bytes)
    batches = window_batches(tokens, context_length=context_length, batch_size=batch_size, vocab_size=vocab_size)
    with evaluation_mode(model), torch.inference_mode():
        for index, (inputs, targets) in enumerate(batches):
            if sharing is not None and index % sharing.count != sharing.rank:
                continue
            losses = _window_losses(model, inputs.to(device), targets.to(device), span)
            sums[: losses.shape[1]] += losses.sum(axis=0)
            counts[: losses.shape[1]] += len(losses)
            if token_bytes is not None:
                num_bytes += int(token_bytes[targets.numpy()].sum(dtype=np.int64))
            if on_progress is not None:
                on_progress(int(counts.sum()), num_predicted)
    if sharing is not None:
        sums, counts, num_bytes = added_up(sharing, sums, counts, num_bytes)
    return PositionLosses(sums, counts, None if token_bytes is None else num_bytes)


def added_up(
    sharing: Sharing, sums: np.ndarray, counts: np.ndarray, num_bytes: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """The sums of all processes; numbers below 2^53 are whole in float64."""
    mine = torch.from_numpy(np.concatenate([sums, counts, [num_bytes]]))
    found = sharing.add_up(mine).numpy()
    size = len(sums)
    return found[:size], found[size : 2 * size].astype(np.int64), int(found[-1])


def _window_losses(model: TransformerLM, inputs: Tensor, targets: Tensor, span: int) -> np.ndarray:
    """Return the losses (batch, length) in float64 of one batch of windows, read span by span, or at once."""
    span = min(span, targets.shape[1])
    parts = zip(hidden_in_spans(model, inputs, span), targets.split(span, dim=1), strict=True)
    return np.concatenate([model.token_losses(*each).cpu().double().numpy() for each in parts], axis=1)
