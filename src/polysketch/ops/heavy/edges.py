"""Where candidates may lie: the edges of every token's aligned chunk."""

import torch
from torch import Tensor

from polysketch.ops.linear.alignment import leading_padding


def chunk_edges(like: Tensor, chunk: int, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The index of the first token of every token's chunk, and that of the first token behind it.

    Chunks count from each row's first real token. A token before it has no chunk: its edges leave out every key.

    Args:
        like: (batch, heads, length, width); its shape and device count.
        chunk: tokens of a chunk.
        key_mask: (batch, length) bool, true where a token is real.

    Returns:
        Two of (batch, length) int64, from 0 to length.
    """
    batch, length = like.shape[0], like.shape[2]
    steps = torch.arange(length, device=like.device).expand(batch, length)
    if key_mask is None:
        before = steps - steps % chunk
        return before, (before + chunk).clamp(max=length)
    padding = leading_padding(key_mask)[:, None]
    before = steps - (steps - padding) % chunk
    after = (before + chunk).clamp(max=length)
    outside = steps < padding
    return before.masked_fill(outside, 0), after.masked_fill(outside, length)
