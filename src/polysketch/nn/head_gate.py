"""A sigmoid gate on the output of every head, from the layer's input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HeadGate(nn.Module):
    """output * 2 sigmoid(W hidden + b), one gate a query head and token, before the output projection.

    The headwise gate of Qiu et al. (arXiv 2505.06708), with which a head can say that it has found
    nothing. Theirs has no factor of 2 and starts near 1/2. Here W and b start at zero: every gate is 1, and the layer
    is what it is without gates.

    Args:
        hidden_size: width of the layer's input.
        num_heads: query heads.
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros: heads differ by their outputs, so gradients do too. No random number is drawn."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, output: Tensor, hidden: Tensor) -> Tensor:
        """Gate (batch, num_heads, length, value_dim) by (batch, length, hidden_size); in the dtype of `output`."""
        gates = 2 * torch.sigmoid(F.linear(hidden, self.weight, self.bias))
        return output * gates.mT.unsqueeze(-1).to(output.dtype)

    def extra_repr(self) -> str:
        """Sizes."""
        return "num_heads={}, hidden_size={}".format(*self.weight.shape)
