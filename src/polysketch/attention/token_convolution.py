"""The depthwise convolution on values that some linear attentions add to their output."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch import ops
from polysketch.ops.arguments import check_at_least_one


class TokenConvolution(nn.Module):
    """y_i = b + sum_t w_t v_{i + t}: over neighbours in the sequence, or in a picture; one filter for each channel.

    All heads share the filters, as in the papers' code. The output of linear attention has a rank of head_dim at most;
    the convolution of values adds to it (FLatten, section 3.4). Weights and biases start uniform within 1 / sqrt(taps).

    Args:
        head_dim: channels. In a value of another width, channel c takes the filter of channel c modulo head_dim.
        size: taps of the filter, or of its side in a picture; odd where it has two sides.
        grid: (height, width) of the picture in tokens; None for a sequence.
        class_tokens: tokens before the picture, such as a class token: no filter reaches them, and nothing is added to
            them.

    Raises:
        TypeError, ValueError: sizes that are no positive integers, or class tokens without a picture.
    """

    def __init__(self, head_dim: int, size: int, grid: tuple[int, int] | None = None, class_tokens: int = 0) -> None:
        super().__init__()
        check_at_least_one(convolution_size=size)
        self.grid = None if grid is None else _checked_grid(grid)
        if self.grid is not None and size % 2 == 0:
            raise ValueError(f"convolution_size must be odd on a grid, so that a filter has a middle, got {size}")
        self.class_tokens = _checked_class_tokens(class_tokens, self.grid)
        taps = (size,) if grid is None else (size, size)
        self.weight = nn.Parameter(torch.empty(1, head_dim, *taps))
        self.bias = nn.Parameter(torch.empty(head_dim))
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -(self.weight[0, 0].numel() ** -0.5), self.weight[0, 0].numel() ** -0.5)

    def forward(self, value: Tensor, *, causal: bool, key_mask: Tensor | None = None) -> Tensor:
        """Convolve a whole sequence or picture; masked tokens count as zeros.

        Args:
            value: (batch, num_kv_heads, length, value_dim).
            causal: over the tokens up to and including the own only; else over as many on both sides.
            key_mask: (batch, length) bool, True for a real token.

        Returns:
            Shaped like value and in its dtype.

        Raises:
            ValueError: a length that is not that of the grid, or an even size without `causal`.
        """
        weight, bias = self._filters(value)
        if self.grid is not None:
            mask = None if key_mask is None else key_mask[:, self.class_tokens :]
            picture = ops.depthwise_convolution_2d(value[:, :, self.class_tokens :], weight, *self.grid, key_mask=mask)
            return F.pad(picture + bias, (0, 0, self.class_tokens, 0))
        if causal:
            return ops.causal_convolution(value, weight, key_mask=key_mask)[0] + bias
        return ops.centred_convolution(value, weight, key_mask=key_mask) + bias

    def extend(self, value: Tensor, tail: Tensor, *, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve the next tokens causally; returns also the tail after them, as `ops.causal_convolution` does."""
        weight, bias = self._filters(value)
        output, tail = ops.causal_convolution(value, weight, key_mask=key_mask, tail=tail)
        return output + bias, tail

    def extra_repr(self) -> str:
        """Sizes."""
        grid = "" if self.grid is None else f", grid={self.grid}"
        before = f", class_tokens={self.class_tokens}" if self.class_tokens else ""
        return f"head_dim={self.weight.shape[1]}, size={self.weight.shape[2]}{grid}{before}"

    def _filters(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The filters and biases of the value's channels, the biases in its dtype."""
        weight, bias = cyclic(self.weight, 1, value.shape[3]), cyclic(self.bias, 0, value.shape[3])
        return weight, bias.to(value.dtype)


def cyclic(x: Tensor, dim: int, width: int) -> Tensor:
    """x with `width` entries along `dim`: the first ones, or all of them over and over."""
    size = x.shape[dim]
    if width <= size:
        return x.narrow(dim, 0, width)
    return x.index_select(dim, torch.arange(width, device=x.device) % size)


def _checked_grid(grid: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(grid, tuple | list) or len(grid) != 2:
        raise TypeError(f"grid must be (height, width) in tokens, got {grid!r}")
    height, width = grid
    check_at_least_one(grid_height=height, grid_width=width)
    return height, width


def _checked_class_tokens(class_tokens: int, grid: tuple[int, int] | None) -> int:
    if isinstance(class_tokens, bool) or not isinstance(class_tokens, int):
        raise TypeError(f"class_tokens must be a number of tokens, got {class_tokens!r}")
    if class_tokens < 0 or (class_tokens and grid is None):
        raise ValueError(f"class_tokens must be a number of tokens before a grid, got {class_tokens} and grid={grid}")
    return class_tokens
