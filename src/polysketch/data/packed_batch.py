"""Documents side by side in one row, as a model takes them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polysketch.targets import NO_TARGET


@dataclass(frozen=True)
class PackedBatch:
    """Rows of equal length, one after the other, in which documents stand side by side and do not see one another.

    Attributes:
        ids: (1, rows * context_length) int64.
        targets: The token that each position predicts, likewise; -100 at padding.
        cu_seqlens: (documents + 1,) int32: where each piece of a document begins, and the end of the last. Every row
            begins with a piece. The padding at the end of a row is a document of its own.
        context_length: Length of a row.
    """

    ids: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    context_length: int

    def __len__(self) -> int:
        """Number of rows."""
        return self.ids.shape[1] // self.context_length

    @cached_property
    def num_tokens(self) -> int:
        """Tokens that predict another one: all but padding."""
        return int((self.targets != NO_TARGET).sum())

    def to(self, device: torch.device) -> PackedBatch:
        """The same on a device; offsets of documents stay in host memory, where they are read."""
        ids, targets = (each.to(device, non_blocking=True) for each in (self.ids, self.targets))
        return dataclasses.replace(self, ids=ids, targets=targets)

    def split(self, rows: int) -> list[PackedBatch]:
        """Parts of so many rows each; the last may have fewer."""
        size = rows * self.context_length
        return [self._part(start, start + size) for start in range(0, self.ids.shape[1], size)]

    def _part(self, start: int, stop: int) -> PackedBatch:
        stop = min(stop, self.ids.shape[1])
        first, last = torch.searchsorted(self.cu_seqlens, torch.tensor([start, stop], dtype=torch.int32)).tolist()
        bounds = self.cu_seqlens[first : last + 1] - start
        return PackedBatch(self.ids[:, start:stop], self.targets[:, start:stop], bounds, self.context_length)
