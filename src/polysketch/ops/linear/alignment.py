"""Bring rows with padding or with a state's open chunk into aligned form: the first token opens a chunk."""

from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.linear.state import LinearAttentionState


class Alignment(NamedTuple):
    """Where each row's tokens go: `fill` tokens of the open chunk first, then the new ones from `start` on.

    Attributes:
        start: (batch,) padding before each row's first real token, on the device of the inputs.
        fill: (batch,) tokens that the state's open chunk holds.
        slots: capacity of the open chunk (0 without a state or a local part).
        length: new tokens, padding included.
    """

    start: Tensor
    fill: Tensor
    slots: int
    length: int

    def total(self) -> Tensor:
        """(batch,) tokens of each aligned row."""
        return self.fill + self.length - self.start

    def to_aligned(self, new: Tensor, opened: Tensor | None = None) -> Tensor:
        """new (batch, heads, length, width) behind opened (batch, heads, slots, width), moved and zero-filled."""
        steps = torch.arange(self.slots + self.length, device=new.device)
        if self.slots and opened is None:
            opened = new.new_zeros(*new.shape[:2], self.slots, new.shape[3])
        source = new if opened is None else torch.cat([opened.to(new.dtype), new], 2)
        behind = self.slots + self.start[:, None] + steps - self.fill[:, None]
        index = torch.where(steps < self.fill[:, None], steps, behind).clamp(max=source.shape[2] - 1)
        moved = _take(source, index)
        return torch.where((steps < self.total()[:, None])[:, None, :, None], moved, 0.0)

    def from_aligned(self, aligned: Tensor) -> Tensor:
        """The new tokens' rows of (batch, heads, aligned length, width), in their places; zeros where padded."""
        steps = torch.arange(self.length, device=aligned.device)
        index = (self.fill[:, None] + steps - self.start[:, None]).clamp(min=0)
        return torch.where((steps >= self.start[:, None])[:, None, :, None], _take(aligned, index), 0.0)


def leading_padding(key_mask: Tensor) -> Tensor:
    """(batch, length) bool -> (batch,): tokens before each row's first real one."""
    return (key_mask.cumsum(1) == 0).sum(1)


def align(key_mask: Tensor | None, state: LinearAttentionState | None, like: Tensor) -> Alignment | None:
    """How rows must be moved, or None where every row is aligned as it is."""
    if not torch.compiler.is_compiling() and key_mask is None and (state is None or not state.fill.any()):
        return None  # decided without a look at the device, for which the host would have to wait
    batch, _, length = like.shape[:3]
    start = torch.zeros(batch, dtype=torch.int64, device=like.device)
    fill, slots = start, 0
    if key_mask is not None:
        start = leading_padding(key_mask)
    if state is not None:
        start = torch.where(state.position.to(like.device) > 0, 0, start)
        fill, slots = state.fill.to(like.device), state.local_chunk
    alignment = Alignment(start, fill, slots, length)
    if torch.compiler.is_compiling():
        return None if key_mask is None and not slots else alignment
    return alignment if bool((start + fill).any()) else None


def open_rows(aligned: Tensor, total: Tensor, chunk: int) -> Tensor:
    """The tokens since each row's last chunk boundary, (batch, heads, chunk, width), zero-filled."""
    if not chunk:
        return aligned.new_empty(*aligned.shape[:2], 0, aligned.shape[3])  # a view would keep all tokens alive
    steps = torch.arange(chunk, device=aligned.device)
    index = (total - total % chunk)[:, None] + steps
    rows = _take(aligned, index.clamp(max=aligned.shape[2] - 1))
    return torch.where((index < total[:, None])[:, None, :, None], rows, 0.0)


def _take(source: Tensor, index: Tensor) -> Tensor:
    return source.gather(2, index[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3]))
