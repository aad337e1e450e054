"""What decoding with a whole model carries."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polysketch.attention import advance_positions


@dataclass
class ModelState:
    """The states of all layers.

    Attributes:
        layers: the state of each layer's mechanism.
        position: (batch,) int64 in host memory, tokens seen since each row's first real one. It changes in place
            (`advance_`, `move_to_`).
        device: where the layers' tensors are.
        device_position: the same numbers as `position` in that device's memory; `position` itself on a CPU.
    """

    layers: list[Any]
    position: Tensor
    device: torch.device | str = "cpu"
    device_position: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Give the device positions of its own."""
        in_host_memory = torch.device(self.device).type == "cpu"
        self.device_position = self.position if in_host_memory else self.position.to(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' states."""
        return self.position.numel() * self.position.element_size() + sum(layer.nbytes for layer in self.layers)

    def next_positions(self, length: int, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(batch, length) positions of the next tokens, and (batch,) those after them where padding makes rows differ.

        Without a mask nothing is sent to the device, which knows the positions: a graph can be captured.
        """
        if key_mask is not None:
            return advance_positions(self.position, length, key_mask)
        steps = torch.arange(length, device=self.device_position.device)
        return self.device_position[:, None] + steps, None

    def pass_(self, length: int, next_position: Tensor | None) -> None:
        """Move on past tokens that `next_positions` was asked for, given its second answer."""
        if next_position is None:
            self.advance_(length)
        else:
            self.move_to_(next_position)

    def advance_(self, tokens: int = 1) -> None:
        """Count so many more tokens in every row, on the host and on the device; nothing waits."""
        self.position += tokens
        if self.device_position is not self.position:
            self.device_position += tokens

    def move_to_(self, position: Tensor) -> None:
        """Take these (batch,) positions in host memory, on the host and on the device."""
        self.position.copy_(position)
        if self.device_position is not self.position:
            self.device_position.copy_(position)

    def count_on_host_(self, position: Tensor) -> None:
        """Take these (batch,) positions in host memory alone, in every layer: a replayed graph moved the device's."""
        for each in (self, *self.layers):
            each.position.copy_(position)

    def reset_(self) -> None:
        """Back to before the first token, at the same addresses.

        Raises:
            AttributeError: a layer's state that cannot.
        """
        for layer in self.layers:
            layer.reset_()
        self.move_to_(torch.zeros_like(self.position))

    def clone(self) -> "ModelState":
        """An independent copy, to roll back to."""
        return ModelState([layer.clone() for layer in self.layers], self.position.clone(), self.device)

    def reorder(self, indices: Tensor) -> "ModelState":
        """The state of the rows `indices` (int64), repeats allowed: what beam search needs."""
        indices = torch.as_tensor(indices)
        rows = self.position.index_select(0, indices.cpu())
        return ModelState([layer.reorder(indices) for layer in self.layers], rows, self.device)
