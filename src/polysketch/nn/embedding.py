"""Sinusoidal positions added to the embedded tokens (Vaswani et al. 2017; PolySketchFormer, appendix I)."""

import torch
from torch import Tensor

from polysketch.nn.angles import places_on_grid, position_angles

_BASE = 10000.0


def sinusoidal_positions(positions: Tensor, width: int) -> Tensor:
    """sin and cos of position / 10000^(2 i / width), interleaved; computed on the fly, so any position will do.

    Args:
        positions: int64, (length,) or (batch, length).
        width: even, the model's width.

    Returns:
        float32, positions.shape + (width,), on the device of positions.

    Raises:
        ValueError: an odd width.
    """
    if width % 2:
        raise ValueError(f"sinusoidal positions need an even width, got {width}")
    angles = position_angles(positions, width, _BASE)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def sinusoidal_positions_on_grid(grid: tuple[int, int], width: int, device: torch.device | None = None) -> Tensor:
    """Those of the row in the first half of the channels, and those of the column in the second.

    Args:
        grid: (height, width) of a picture in tokens, which stand row by row.
        width: a multiple of 4, the model's width.
        device: the default one when None.

    Returns:
        float32, (tokens, width).

    Raises:
        ValueError: another width.
    """
    if width % 4:
        raise ValueError(f"sinusoidal positions on a grid need a width that is a multiple of 4, got {width}")
    return torch.cat([sinusoidal_positions(at, width // 2) for at in places_on_grid(grid, device)], -1)
