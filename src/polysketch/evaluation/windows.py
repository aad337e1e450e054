"""Cut a flat run of tokens into windows so that every token but the first is predicted exactly once."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from polysketch.data.tokens import Tokens

__all__ = ["window_batches"]


def window_batches(
    tokens: Tokens, *, context_length: int, batch_size: int, vocab_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets) covering `tokens` without overlap; the windows of one batch have equal length.

    Window w reads tokens w * context_length up to (w + 1) * context_length and predicts the token after each.
    What is left at the end is one shorter window, alone in its batch, so that nothing is padded and nothing dropped.

    Args:
        tokens: token ids, shape (num_tokens,), any integer dtype; a memory map is read batch by batch.
        context_length: tokens in a window, at least 1.
        batch_size: windows in a batch, at least 1.
        vocab_size: an id at or above it is refused before it reaches the embedding.

    Yields:
        int64 tensors on the CPU, (batch, length) both; targets are the inputs shifted by one token.

    Raises:
        ValueError: `tokens` holds an id that the model has no embedding for.
    """
    num_predicted = len(tokens) - 1
    num_whole = num_predicted // context_length
    for first in range(0, num_whole, batch_size):
        count = min(batch_size, num_whole - first)
        yield _cut(tokens, first * context_length, count, context_length, vocab_size)
    rest = num_predicted - num_whole * context_length
    if rest:
        yield _cut(tokens, num_whole * context_length, 1, rest, vocab_size)


def _cut(tokens: Tokens, start: int, count: int, length: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return `count` consecutive windows of `length` from `start` on, as inputs and targets."""
    ids = torch.from_numpy(np.array(tokens[start : start + count * length + 1], dtype=np.int64))
    require_known_ids(ids, vocab_size)
    return ids[:-1].view(count, length), ids[1:].view(count, length)


def require_known_ids(ids: Tensor, vocab_size: int) -> None:
    """Refuse ids outside [0, vocab_size): on a GPU they would end the process instead of raising."""
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"expected token ids from 0 to {vocab_size - 1}, found {lowest if lowest < 0 else highest}: "
            "the data was probably prepared with another tokenizer than the model was trained with"
        )
