"""The memory that decoding carries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polysketch.ops.linear.state import state_dtype


@dataclass
class DeltaMemoryState:
    """The state of `delta_memory` between two spans of a sequence; its size does not depend on the tokens seen.

    Attributes:
        sums: (batch, key_heads, size^2, value_dim), float32, or float64 for float64 inputs; it changes in place.
        size: cells of each of the two sparse vectors.
    """

    sums: Tensor
    size: int

    @classmethod
    def init(
        cls,
        batch_size: int,
        num_key_heads: int,
        size: int,
        value_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "DeltaMemoryState":
        """An empty memory: zeros.

        Args:
            batch_size, num_key_heads, size, value_dim: sizes.
            dtype: float32 or float64; narrower types are raised to float32.
        """
        shape = (batch_size, num_key_heads, size * size, value_dim)
        return cls(torch.zeros(shape, device=device, dtype=state_dtype(dtype)), size)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self.sums.numel() * self.sums.element_size()

    def clone(self) -> "DeltaMemoryState":
        """A copy to roll back to."""
        return DeltaMemoryState(self.sums.clone(), self.size)

    def reorder(self, indices: Tensor) -> "DeltaMemoryState":
        """The rows `indices` (int64) of the batch, repeated or dropped as they are named: for beam search."""
        return DeltaMemoryState(self.sums.index_select(0, indices.to(self.sums.device)), self.size)
