"""What sums at power 2 cannot resolve: a mass so small that the rounding of its products hides it.

    mass = sum over a, b of q_a q_b z_ab, z_ab = sum over j of k_ja k_jb

adds products of both signs. Where a query is nearly orthogonal to all keys they cancel, and what is left is the
rounding of z: a mass of any size and sign, and a quotient of noise by noise. Its squares alone, a = b, have weights
q_a^2 k_ja^2 that are not negative, and a mass that is known to the last digits. So a mass is taken for at least
`resolution` times that of its squares, and what is missing is given to the mean of the values by the squares: outputs
stay in the range of the values, up to the rounding of the products over the resolution. Features that are not negative
have a mass above that of their squares: nothing changes for them. The gradient takes what was given for a constant.
"""

from functools import cache

import torch
from torch import Tensor

from polysketch.ops.linear.packing import TILE, tile_pairs

_UNITS = 2048.0
"""Of rounding, eps: 2^-12 in float32, mirrored as kResolved in ops/native/source/memory.h."""


def resolution(dtype: torch.dtype) -> float:
    """The least mass that sums in this dtype resolve, in masses of the squares."""
    return _UNITS * torch.finfo(dtype).eps


def missing_mass(mass: Tensor, squares: Tensor) -> Tensor:
    """What each mass lacks to the least one, given those of the squares; zero where it lacks nothing."""
    least = squares * resolution(mass.dtype)
    return torch.where(mass < least, least - mass, 0.0)


def resolve(
    query: Tensor, sums: Tensor, normalizer: Tensor, factor: Tensor | None, numerator: Tensor, mass: Tensor
) -> tuple[Tensor, Tensor]:
    """Numerator (..., R, h) and mass (..., R), the offset and all else included, with what the mass lacked.

    Args:
        query: (..., R, r).
        sums, normalizer: (..., e, h) and (..., e), in the layout of a state, at power 2.
        factor: (..., R), the decay from the sums to the queries; None for 1.
        numerator, mass: as found; not changed.
    """
    rows, weights = _square_rows(query.shape[-1], query.device), query.square()
    squares = (weights @ normalizer[..., rows, None])[..., 0]
    missing = missing_mass(mass, squares if factor is None else squares * factor).detach()
    by = missing / squares.detach().masked_fill(missing == 0, 1.0)
    return numerator + (weights * by[..., None]) @ sums[..., rows, :], mass + missing


@cache
def _square_rows(feature_dim: int, device: torch.device) -> Tensor:
    """(r,): where the squares of the features stand in the layout of a state."""
    place = {pair: index for index, pair in enumerate(tile_pairs(feature_dim))}
    tiles = [(place[a // TILE, a // TILE], a % TILE) for a in range(feature_dim)]
    return torch.tensor([(tile * TILE + a) * TILE + a for tile, a in tiles], device=device)
