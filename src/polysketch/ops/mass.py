"""Division by a row's sum of weights."""

import torch
from torch import Tensor


def is_none(mass: Tensor) -> Tensor:
    """Where a row has no weight: bool, of the same shape.

    That includes a mass below the smallest normal number of its dtype, 1e-38 in float32, of which rounding has left
    little, and whose inverse may be infinite. NaN is a mass.
    """
    return mass.abs() < torch.finfo(mass.dtype).tiny


def quotient(numerator: Tensor, mass: Tensor) -> Tensor:
    """numerator (..., width) / mass (...), and zeros for a row without weight; so is every gradient there."""
    none = is_none(mass)
    return torch.where(none[..., None], 0.0, numerator / mass.masked_fill(none, 1.0)[..., None])
