"""Packed products: what a vector's tensor square holds, each unordered pair of entries once."""

import math

import torch
from torch import Tensor


def pack_square(x: Tensor) -> Tensor:
    """The d (d + 1) / 2 packed entries of x (x) x, so that pack_square(x) . pack_square(y) = (x . y)^2.

    First the squares x_i^2, then sqrt(2) x_i x_j for every pair i < j, which stands for two entries of the tensor
    square. Without the sqrt(2) the products would be those of another kernel.

    Args:
        x: (..., d), any floating dtype; the result has the same.

    Returns:
        (..., d (d + 1) / 2).

    Cost: one multiplication for each product and one for its factor.
    """
    width = x.shape[-1]
    # Entry i times the entry `shift` places on, round the circle: each pair once for shifts below d / 2, and the
    # shift of d / 2, if d is even, gives each of its pairs twice, of which the first half is kept.
    circle = torch.cat([x, x[..., : width // 2]], -1).unfold(-1, width, 1)
    products = (x[..., None, :] * circle).flatten(-2)[..., : packed_size(width)]
    return torch.cat([products[..., :width], math.sqrt(2.0) * products[..., width:]], -1)


def packed_size(width: int) -> int:
    """d (d + 1) / 2, the number of packed products of a vector of `width` entries."""
    return width * (width + 1) // 2
