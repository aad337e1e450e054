"""Angles of positions at geometrically spaced frequencies: what both kinds of position embedding are made of."""

import math

import torch
from torch import Tensor


def position_angles(positions: Tensor, width: int, base: float) -> Tensor:
    """Angles position * base^(-2 i / width), i < width / 2, reduced to one turn.

    Products are taken in float64 where the device has it: at position 10^6 a float32 angle is off by 0.06.

    Args:
        positions: int64, any shape.
        width: even; twice the number of angles.
        base: the lowest frequency is about 1 / base.

    Returns:
        float32, positions.shape + (width / 2,).

    Raises:
        ValueError: a width or a base that is not above 0, or a width that no memory holds.
    """
    if not 0 < width < 2**40 or not base > 0:
        raise ValueError(f"expected a width and a base of positions above 0, found {width} and {base}")
    frequencies = _frequencies(width, base, positions.device)
    angles = positions.to(frequencies.dtype)[..., None] * frequencies
    return angles.remainder(2 * math.pi).float()


def _frequencies(width: int, base: float, device: torch.device) -> Tensor:
    dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    exponents = torch.arange(width // 2, device=device, dtype=dtype) * (-2.0 / width)
    return base**exponents


def places_on_grid(grid: tuple[int, int], device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The row and the column of every token of a picture, which stand row by row: int64, (height * width,) each.

    Raises:
        ValueError: a height or a width below 1, or a picture that no memory holds.
    """
    height, width = grid
    if height < 1 or width < 1 or height * width >= 2**40:
        raise ValueError(f"expected the height and the width of a picture in tokens, found {height} and {width}")
    tokens = torch.arange(height * width, device=device)
    return tokens // width, tokens % width
