"""What decoding with a whole model carries."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class ModelState:
    """The states of all layers.

    Attributes:
        layers: the state of each layer's mechanism.
        position: (batch,) int64 in host memory, tokens seen since each row's first real one.
    """

    layers: list[Any]
    position: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' states."""
        return self.position.numel() * self.position.element_size() + sum(layer.nbytes for layer in self.layers)

    def clone(self) -> "ModelState":
        """An independent copy, to roll back to."""
        return ModelState([layer.clone() for layer in self.layers], self.position.clone())

    def reorder(self, indices: Tensor) -> "ModelState":
        """The state of the rows `indices` (int64), repeats allowed: what beam search needs."""
        indices = torch.as_tensor(indices)
        return ModelState(
            [layer.reorder(indices) for layer in self.layers], self.position.index_select(0, indices.cpu())
        )
