"""The products x_a x_b, a <= b, as the native backend keeps them, and the way to the public tiles and back.

Row-major: (0, 0), (0, 1), ..., (0, r - 1), (1, 1), ...; r (r + 1) / 2 rows, where tiles have about r^2 / 2 + 8 r.
"""

from functools import cache

import torch
from torch import Tensor

from polysketch.ops.linear.packing import TILE, expanded_size, tile_pairs


def num_pairs(feature_dim: int) -> int:
    """Rows of the expansion of `feature_dim` features."""
    return feature_dim * (feature_dim + 1) // 2


def from_tiles(packed: Tensor, feature_dim: int) -> Tensor:
    """Sums in the public layout (batch, heads, expanded_size, h) -> (batch, heads, num_pairs, h).

    The mean of the two places that a tile on the diagonal has for a pair.
    """
    upper, lower, _ = _places(feature_dim, packed.device)
    return (packed[:, :, upper] + packed[:, :, lower]).mul_(0.5)


def from_tiles_backward(gradient: Tensor, feature_dim: int) -> Tensor:
    """The adjoint of `from_tiles`."""
    upper, lower, _ = _places(feature_dim, gradient.device)
    batch, heads, _, width = gradient.shape
    packed = gradient.new_zeros(batch, heads, expanded_size(feature_dim, 2), width)
    return packed.index_add_(2, upper, gradient, alpha=0.5).index_add_(2, lower, gradient, alpha=0.5)


def to_tiles(sums: Tensor, feature_dim: int) -> Tensor:
    """Sums (batch, heads, num_pairs, h) -> the public layout, zero where features are padding."""
    _, _, back = _places(feature_dim, sums.device)
    return torch.nn.functional.pad(sums, (0, 0, 0, 1))[:, :, back]


def to_tiles_backward(gradient: Tensor, feature_dim: int) -> Tensor:
    """The adjoint of `to_tiles`."""
    _, _, back = _places(feature_dim, gradient.device)
    batch, heads, _, width = gradient.shape
    sums = gradient.new_zeros(batch, heads, num_pairs(feature_dim) + 1, width)
    return sums.index_add_(2, back, gradient)[:, :, :-1].contiguous()


@cache
def _places(feature_dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Each pair's public places, as (a, b) and as (b, a); each public place's pair, num_pairs for padding."""
    public = {
        (i * TILE + a, j * TILE + b): (tile * TILE + a) * TILE + b
        for tile, (i, j) in enumerate(tile_pairs(feature_dim))
        for a in range(TILE)
        for b in range(TILE)
    }
    pairs = [(a, b) for a in range(feature_dim) for b in range(a, feature_dim)]
    rank = {pair: place for place, pair in enumerate(pairs)}
    upper = [public[pair] for pair in pairs]
    lower = [public.get((b, a), public[a, b]) for a, b in pairs]
    back = [rank.get((min(place), max(place)), len(pairs)) for place in public]
    return torch.tensor(upper, device=device), torch.tensor(lower, device=device), torch.tensor(back, device=device)
