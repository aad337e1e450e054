"""A gate on the output of attention, linear in the layer's input."""

import torch.nn.functional as F
from torch import Tensor, nn

from polysketch.attention.token_convolution import cyclic
from polysketch.feature_maps import lecun_normal_
from polysketch.ops.arguments import check_at_least_one


class OutputGate(nn.Linear):
    """output * (W hidden), entry by entry, without an activation, for every channel of every query head; no bias.

    Args:
        hidden_size: width of the layer's input.
        num_heads: query heads.
        head_dim: channels of a head.

    Raises:
        TypeError, ValueError: a hidden_size that is no positive integer.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        check_at_least_one(hidden_size=hidden_size)
        super().__init__(hidden_size, num_heads * head_dim, bias=False)
        self.num_heads = num_heads
        lecun_normal_(self.weight, hidden_size)

    def forward(self, output: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Gate (batch, num_heads, length, value_dim) by (batch, length, hidden_size).

        Where value_dim is not head_dim, channel c takes the gate of channel c modulo head_dim of its head.

        Raises:
            ValueError: no hidden, or one of another width.
        """
        if hidden is None or hidden.shape[-1] != self.in_features:
            found = "nothing" if hidden is None else f"{tuple(hidden.shape)}"
            raise ValueError(f"a gated mechanism needs hidden=(batch, length, {self.in_features}), got {found}")
        gates = F.linear(hidden.to(self.weight.dtype), self.weight).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return output * cyclic(gates, 3, output.shape[3]).to(output.dtype)
