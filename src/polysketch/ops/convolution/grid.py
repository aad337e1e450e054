"""Convolution over a picture's patches."""

import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.convolution.checks import check, check_odd, masked, sum_dtype


def depthwise_convolution_2d(
    x: Tensor, weight: Tensor, height: int, width: int, *, key_mask: Tensor | None = None
) -> Tensor:
    """Convolve tokens that are a picture's patches, row by row, every head and channel by itself.

    The middle tap is the token's own; zeros stand around the picture.

    Args:
        x: (batch, heads, height * width, channels), floating point.
        weight: (heads or 1, channels or 1, rows, columns), both odd.
        height, width: of the picture in tokens.
        key_mask: (batch, height * width) bool; masked tokens count as zeros.

    Returns:
        Shaped like x and in its dtype. Sums are float32, or float64 for float64 inputs, under autocast too.

    Raises:
        ValueError: shapes that do not fit, or another number of tokens than height * width.
        TypeError: an x that is not floating, or a mask that is not bool.

    Cost: rows * columns multiply-adds an entry of x.
    """
    check(x, weight, 4, key_mask)
    check_odd(weight, 2, 3)
    batch, heads, length, channels = x.shape
    if length != height * width:
        raise ValueError(
            f"a grid of {height} x {width} holds {height * width} tokens, got a length of {length};"
            " are there tokens that are no patches, such as a class token or padding?"
        )
    picture = masked(x, key_mask).to(sum_dtype(x)).transpose(2, 3).reshape(batch, heads * channels, height, width)
    taps = weight.to(sum_dtype(x)).expand(heads, channels, -1, -1).reshape(heads * channels, 1, *weight.shape[2:])
    padding = (weight.shape[2] // 2, weight.shape[3] // 2)
    with without_autocast(x.device.type):
        output = F.conv2d(picture, taps, padding=padding, groups=heads * channels)
    return output.reshape(batch, heads, channels, length).transpose(2, 3).to(x.dtype)
