"""The fast Walsh-Hadamard transform."""

import torch
from torch import Tensor


def hadamard_transform(x: Tensor) -> Tensor:
    """x H over the last dimension, with H the unscaled Walsh-Hadamard matrix of entries 1 and -1.

        H_1 = [1],    H_2w = [[H_w, H_w], [H_w, -H_w]]

    H is symmetric and H H = width I: applied twice, it gives width times the input.

    Args:
        x: (..., width), width a power of two.

    Returns:
        A new tensor of the shape and dtype of `x`.

    Raises:
        ValueError: a width that is no power of two; pad with zeros.

    Cost: width log2(width) additions a row, where the product with the matrix takes width^2 multiply-adds.
    """
    width = x.shape[-1] if x.dim() else 0
    if width < 1 or width & (width - 1):
        raise ValueError(
            f"a Walsh-Hadamard transform needs a width that is a power of two, got {width}: pad with zeros"
        )
    result, half = x.clone(), 1
    while half < width:
        left, right = result.unflatten(-1, (-1, 2, half)).unbind(-2)
        result = torch.stack([left + right, left - right], -2).flatten(-3)
        half *= 2
    return result
