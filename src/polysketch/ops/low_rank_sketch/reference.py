"""The definition, in PyTorch's operations."""

from functools import reduce

import torch
from torch import Tensor


def low_rank_sketch(x: Tensor, factors: Tensor) -> Tensor:
    """sum_t prod_j x Theta_tj; arguments as `polysketch.ops.low_rank_sketch.low_rank_sketch`."""
    grouped = x.unflatten(1, (factors.shape[0], -1))
    products = (_product(grouped, term) for term in factors.unbind(1))
    return reduce(torch.add, products).flatten(1, 2)


def _product(grouped: Tensor, factors: Tensor) -> Tensor:
    """prod_j x Theta_j: (batch, maps, heads, length, inputs) by (maps, degree, inputs, features)."""
    first, *others = factors.unbind(1)
    product = grouped @ first[:, None]
    for factor in others:
        product = product * (grouped @ factor[:, None])
    return product
