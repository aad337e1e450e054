"""Rotary positions (Su et al. 2021), in the form that rotates the first half of a head against its second half."""

from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.nn.angles import position_angles


class Rotation(NamedTuple):
    """Cosine and sine of the angles of some positions, computed once and shared by every layer.

    Attributes:
        cos: float32, (length, head_dim / 2); (batch, 1, length, head_dim / 2) where rows have their own positions.
        sin: the same shape.
    """

    cos: Tensor
    sin: Tensor


def rotation_at(positions: Tensor, head_dim: int, base: float = 10000.0) -> Rotation:
    """The rotation of each position: angle position * base^(-2 i / head_dim) for the pair i.

    Nothing is tabulated: any position will do, and the cost is one sine and cosine per position and pair for the
    whole model.

    Args:
        positions: int64, (length,) or (batch, length).
        head_dim: even.
        base: 10000 in the papers; larger for longer contexts.

    Raises:
        ValueError: an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"rotary positions need an even head_dim, got {head_dim}")
    angles = position_angles(positions, head_dim, base)
    if positions.dim() == 2:
        angles = angles[:, None]
    return Rotation(angles.cos(), angles.sin())


def apply_rotation(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim / 2]); products of a query and a key then depend on their distance alone.

    Args:
        x: (batch, heads, length, head_dim).
        rotation: of the positions of x.

    Returns:
        The same shape and dtype; computed in float32 or better.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
