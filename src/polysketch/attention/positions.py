"""Positions of tokens in rows that may start with padding."""

import torch
from torch import Tensor


def advance_positions(position: Tensor, length: int, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Positions of the next `length` tokens of each row, and how far each row then is.

    A row's first real token is at position 0; masked tokens after it count, masked tokens before it do not (they are
    given position 0).

    Args:
        position: (batch,) int64 in host memory, tokens seen since the row's first real one.
        length: number of new tokens.
        key_mask: (batch, length) bool, True for a real token; None when all are real.

    Returns:
        (batch, length) int64 positions and the (batch,) int64 position after them, both in host memory.

    Raises:
        ValueError: a length below 0, or one that no memory holds.
    """
    if not 0 <= length < 2**40:
        raise ValueError(f"expected a number of new tokens, found {length}")
    if key_mask is None:
        return position[:, None] + torch.arange(length, device="cpu"), position + length
    started = (key_mask.cpu().cumsum(1) > 0) | (position > 0)[:, None]
    positions = position[:, None] + started.cumsum(1) - 1
    return positions.clamp(min=0), position + started.sum(1)
