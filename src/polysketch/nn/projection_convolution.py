"""Short causal convolutions of queries, keys and values, and the state of a layer that has them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polysketch import ops
from polysketch.ops.arguments import check_at_least_one


class ProjectionConvolution(nn.Module):
    """y_i = sum_t w_t x_{i - (size - 1) + t}, every channel of the projections by itself; no activation, no bias.

    By itself it starts as the identity: the last tap, the token's own, is 1, the others 0. A query, key or value can
    then blend in those of the tokens before it, so that one layer compares a token with the predecessor of another
    (induction; `SelfAttention` starts with that).
    Gated DeltaNet (Yang et al., arXiv 2412.06464) and Kimi Linear (arXiv 2510.26692) have such filters, drawn at random
    and with a SiLU behind them.

    Args:
        width: channels of queries, keys and values together.
        size: taps of a filter; 4 in the papers.

    Raises:
        TypeError, ValueError: a size that is no positive integer.

    Cost: `size` multiply-adds a channel and token; a tail of (size - 1) * width numbers.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        check_at_least_one(width=width, size=size)
        self.size = size
        self.filter = nn.Parameter(torch.empty(1, width, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity; no random number is drawn."""
        nn.init.zeros_(self.filter)
        nn.init.ones_(self.filter[..., -1])

    def forward(
        self, projected: Tensor, *, key_mask: Tensor | None = None, tail: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(batch, length, width) -> the same, and the tail after them; arguments as for `ops.causal_convolution`."""
        output, tail = ops.causal_convolution(projected[:, None], self.filter, key_mask=key_mask, tail=tail)
        return output[:, 0], tail

    def init_tail(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """(batch, 1, size - 1, width) zeros; on the device and in the dtype of the filter where they are None."""
        _, width, size = self.filter.shape
        shape = (batch_size, 1, size - 1, width)
        return torch.zeros(shape, device=device or self.filter.device, dtype=dtype or self.filter.dtype)

    def extra_repr(self) -> str:
        """Channels and taps."""
        return "width={}, size={}".format(*self.filter.shape[1:])


@dataclass
class ProjectionConvolutionState:
    """The state of a mechanism, and the last projections before the convolution of queries, keys and values.

    Attributes:
        attention: the mechanism's state.
        tail: (batch, 1, size - 1, width).
    """

    attention: Any
    tail: Tensor

    @property
    def position(self) -> Tensor:
        """(batch,) int64 in host memory, tokens seen since each row's first real one: the mechanism's own tensor."""
        return self.attention.position

    @property
    def device_position(self) -> Tensor:
        """The same numbers in the device's memory, where the mechanism's state has them."""
        return self.attention.device_position

    @property
    def nbytes(self) -> int:
        """Bytes of the mechanism's state and the tail."""
        return self.attention.nbytes + self.tail.numel() * self.tail.element_size()

    def reset_(self) -> None:
        """Back to before the first token, at the same addresses.

        Raises:
            AttributeError: a mechanism's state that cannot.
        """
        self.attention.reset_()
        self.tail.zero_()

    def clone(self) -> "ProjectionConvolutionState":
        """An independent copy, to roll back to."""
        return ProjectionConvolutionState(self.attention.clone(), self.tail.clone())

    def reorder(self, indices: Tensor) -> "ProjectionConvolutionState":
        """The state of the rows `indices` (int64), repeats allowed: what beam search needs."""
        tail = self.tail.index_select(0, indices.to(self.tail.device))
        return ProjectionConvolutionState(self.attention.reorder(indices), tail)
