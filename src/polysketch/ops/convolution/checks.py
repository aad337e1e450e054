"""What every convolution asks of its arguments, and what masks and sums are."""

import torch
from torch import Tensor


def check(x: Tensor, weight: Tensor, weight_dim: int, key_mask: Tensor | None) -> None:
    """Refuse shapes and dtypes that do not fit.

    Raises:
        ValueError: shapes.
        TypeError: an x that is not floating, or a mask that is not bool.
    """
    if x.dim() != 4:
        raise ValueError(f"x must be (batch, heads, length, width), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    shape = tuple(weight.shape)
    if len(shape) != weight_dim or shape[0] not in (1, x.shape[1]) or shape[1] not in (1, x.shape[3]) or 0 in shape:
        sizes = "size" if weight_dim == 3 else "rows, columns"
        raise ValueError(f"weight must be ({x.shape[1]} or 1, {x.shape[3]} or 1, {sizes}), got {shape}")
    if key_mask is not None and key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask must be bool, True where a token is real, got {key_mask.dtype}")
    if key_mask is not None and tuple(key_mask.shape) != (x.shape[0], x.shape[2]):
        expected = (x.shape[0], x.shape[2])
        raise ValueError(f"key_mask must be (batch, length) = {expected}, got {tuple(key_mask.shape)}")


def check_tail(x: Tensor, weight: Tensor, tail: Tensor | None) -> None:
    """Refuse a tail of another shape.

    Raises:
        ValueError: with the shape that it should have.
    """
    shape = tail_shape(x, weight)
    if tail is not None and tuple(tail.shape) != shape:
        raise ValueError(f"tail must be (batch, heads, size - 1, width) = {shape}, got {tuple(tail.shape)}")


def check_odd(weight: Tensor, *dims: int) -> None:
    """Refuse a filter without a middle.

    Raises:
        ValueError: an even number of taps.
    """
    if any(weight.shape[dim] % 2 == 0 for dim in dims):
        sizes = " x ".join(str(weight.shape[dim]) for dim in dims)
        raise ValueError(f"a convolution without causality needs an odd number of taps to have a middle, got {sizes}")


def tail_shape(x: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
    """(batch, heads, size - 1, width)."""
    return (x.shape[0], x.shape[1], weight.shape[2] - 1, x.shape[3])


def masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zeros where there is no real token; whatever stood there, NaN too, is gone."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0.0)


def sum_dtype(x: Tensor) -> torch.dtype:
    """Float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)
