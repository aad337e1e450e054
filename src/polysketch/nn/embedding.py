"""Sinusoidal positions added to the embedded tokens (Vaswani et al. 2017; PolySketchFormer, appendix I)."""

import torch
from torch import Tensor

from polysketch.nn.angles import position_angles

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
