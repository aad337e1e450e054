"""A learned matrix for every key/value head."""

import torch
from torch import Tensor, nn


class HeadProjection(nn.Module):
    """x -> x W with a W for every key/value head, which the query heads it serves share; no bias.

    The weight is left unset: whoever makes one says how it begins.

    Args:
        num_maps: number of matrices, one for each key/value head.
        inputs: width of x.
        outputs: width of x W.
    """

    def __init__(self, num_maps: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_maps, inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, heads, length, inputs) -> (batch, heads, length, outputs), in the weight's dtype or autocast's."""
        grouped = x.to(self.weight.dtype).unflatten(1, (self.weight.shape[0], -1))
        return (grouped @ self.weight[:, None]).flatten(1, 2)

    def extra_repr(self) -> str:
        """The sizes."""
        return "num_maps={}, inputs={}, outputs={}".format(*self.weight.shape)
