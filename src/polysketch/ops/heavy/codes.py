"""Buckets of lines through the origin: an even power cannot tell q from -q, and neither may its hash."""

import torch
from torch import Tensor

from polysketch.ops.hyper import hash_codes


def line_codes(x: Tensor, hyperplanes: Tensor) -> Tensor:
    """The bucket of the line through x: x and -x share it, so b hyperplanes make 2^(b - 1) buckets.

    Of the two codes of a line by `hash_codes` it is the one whose first bit is set, without that bit. Two vectors at
    the angle a share a bucket with probability (1 - a / pi)^b + (a / pi)^b over Gaussian hyperplanes. No gradient;
    computed in float32 or better, also under autocast.

    Args:
        x: (..., head_dim), floating point.
        hyperplanes: (head_dim, bits), the normals.

    Returns:
        (...) int64, from 0 to 2^(bits - 1) - 1.

    Raises:
        ValueError, TypeError: as `hash_codes`.

    Cost: 2 * bits * head_dim operations a vector.
    """
    codes = hash_codes(x, hyperplanes)
    opposite = codes ^ (2 ** hyperplanes.shape[1] - 1)
    return torch.where(codes & 1 == 1, codes, opposite) >> 1
