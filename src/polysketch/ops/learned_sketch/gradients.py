"""Gradients of all weights as one tensor: few large sums, and no copy for each of many small tensors.

Those of norms come first, then those of matrices, both in the order of the weights.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


def dtype_of_all(weights: Sequence[Tensor]) -> torch.dtype:
    """The dtype in which no gradient of a weight loses precision."""
    return reduce(torch.promote_types, {weight.dtype for weight in weights})


def length_of_all(weights: Sequence[Tensor]) -> int:
    """Numbers of all weights."""
    return sum(weight.numel() for weight in weights)


def joined(gradients: Sequence[Tensor]) -> Tensor:
    """The one tensor, from the gradients of the weights in their order."""
    return torch.cat([gradient.reshape(-1) for gradient in sorted(gradients, key=Tensor.dim)])


def parts_of(gradients: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of every weight, in the order of the weights: views of the one tensor."""
    order = sorted(range(len(weights)), key=lambda index: weights[index].dim())
    parts = gradients.split([weights[index].numel() for index in order])
    found = {index: part.view(weights[index].shape) for index, part in zip(order, parts, strict=True)}
    return [found[index] for index in range(len(weights))]
