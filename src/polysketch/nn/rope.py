"""Rotary positions (Su et al. 2021), in the form that rotates the first half of a head against its second half."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from polysketch.nn.angles import places_on_grid, position_angles


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


def rotation_on_grid(
    grid: tuple[int, int],
    head_dim: int,
    base: float = 100.0,
    *,
    class_tokens: int = 0,
    device: torch.device | None = None,
) -> Rotation:
    """The rotation of the places of a picture: half of the pairs turn by the row, the other half by the column.

    Axial frequencies: Heo, Park, Han and Yun, "Rotary Position Embedding for Vision Transformer" (ECCV 2024). A product
    of a rotated query and a rotated key depends on how many rows and how many columns lie between them.

    Args:
        grid: (height, width) of the picture in tokens, which stand row by row.
        head_dim: a multiple of 4.
        base: 100 in the paper, for pictures are not as long as texts.
        class_tokens: tokens before the picture; they are not rotated.
        device: of the rotation; the default one when None.

    Raises:
        ValueError: another head_dim.
    """
    if head_dim % 4:
        raise ValueError(f"rotary positions on a grid need a head_dim that is a multiple of 4, got {head_dim}")
    rows, columns = (position_angles(at, head_dim // 2, base) for at in places_on_grid(grid, device))
    places = torch.cat([rows, columns], -1)
    angles = torch.cat([places.new_zeros(class_tokens, head_dim // 2), places])
    return Rotation(angles.cos(), angles.sin())


def apply_rotation(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim / 2]).

    A product of a rotated query and a rotated key depends on their distance alone. A mechanism that norms them
    afterwards, with a scale and a bias, makes it depend on both positions.

    Args:
        x: (batch, heads, length, head_dim).
        rotation: of the positions of x.

    Returns:
        The same shape and dtype; computed in float32 or better.
    """
    cos, sin = rotation
    if torch.compiler.is_compiling():
        return _formula(x, cos, sin)
    return _Rotate.apply(x, cos, sin) if x.requires_grad and torch.is_grad_enabled() else _rotated(x, cos, sin)


def _formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """For a compiler, which fuses it."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The formula in half as many passes over memory, for where no compiler fuses them."""
    first, second = x.chunk(2, dim=-1)
    wide = torch.promote_types(x.dtype, cos.dtype)
    rotated = torch.empty_like(x, dtype=wide, memory_format=torch.contiguous_format)
    left, right = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    return rotated.to(x.dtype)


class _Rotate(torch.autograd.Function):
    """`_rotated` and its gradient, the rotation back."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _rotated(x, cos, sin)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        _, cos, sin = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(gradients[0], cos, -sin), None, None
