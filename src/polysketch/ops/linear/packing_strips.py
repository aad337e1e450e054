"""The products x_a x_b, a <= b, as the chunked backend works on them: tokens innermost, close to r (r + 1) / 2 rows.

Rows of x (r, tokens) are cut into strips of 4. Strip I contributes x_a x_b for a in the strip and every b from the
strip's first row on, in row-major order; so a pair within a strip stands twice, every other pair once. With tokens
innermost each product is one long vector operation. The public layout (`packing.py`) is met only where a state comes in
or goes out.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.linear.packing import TILE, expanded_size, tile_pairs

STRIP = 4


def triangle_size(feature_dim: int) -> int:
    """Rows of the expansion of `feature_dim` features, a multiple of 4."""
    return sum(STRIP * (feature_dim - first) for first in range(0, feature_dim, STRIP))


def weights(feature_dim: int, like: Tensor) -> Tensor:
    """(triangle_size, 1): 1 for products within a strip, 2 for those between strips, so that

    (x . y)^2 = sum over rows of weight * expansion of x * expansion of y.
    """
    strips = [
        (first, b) for first in range(0, feature_dim, STRIP) for _ in range(STRIP) for b in range(first, feature_dim)
    ]
    return like.new_tensor([1.0 if b < first + STRIP else 2.0 for first, b in strips])[:, None]


class Triangle:
    """Memory for one expansion, with the views of its strips made once: a loop over chunks expands hundreds of times.

    Attributes:
        x: (G, r, T), what is expanded; `load` fills it.
        rows: (G, triangle_size(r), T), the expansion.
    """

    def __init__(self, groups: int, feature_dim: int, tokens: int, like: Tensor):
        self.x = like.new_empty(groups, feature_dim, tokens)
        self.rows = like.new_empty(groups, triangle_size(feature_dim), tokens)
        self._gradient = torch.empty_like(self.x)
        self._strips = list(self._make_strips(feature_dim))

    def _make_strips(self, feature_dim: int) -> Iterator["_Strip"]:
        start, scratch = 0, self.rows.new_empty(self.x.shape[0], STRIP * feature_dim, self.x.shape[2])
        for first in range(0, feature_dim, STRIP):
            size = STRIP * (feature_dim - first)
            yield _Strip(
                left=self.x[:, first : first + STRIP, None],
                right=self.x[:, None, first:],
                products=self.rows[:, start : start + size].unflatten(1, (STRIP, -1)),
                scratch=scratch[:, :size].unflatten(1, (STRIP, -1)),
                left_gradient=self._gradient[:, first : first + STRIP],
                right_gradient=self._gradient[:, first:],
            )
            start += size

    def load(self, x: Tensor) -> "Triangle":
        """Take x (G, T, r)."""
        self.x.copy_(x.mT)
        return self

    def expand(self) -> Tensor:
        """The expansion `rows` of what was loaded, valid until the next one."""
        for strip in self._strips:
            torch.mul(strip.left, strip.right, out=strip.products)
        return self.rows

    def contract(self) -> Tensor:
        """The adjoint: the gradient of what was loaded, (G, T, r), given that of the expansion in `rows`."""
        self._gradient.zero_()
        for strip in self._strips:
            strip.left_gradient.add_(torch.mul(strip.products, strip.right, out=strip.scratch).sum(2))
            strip.right_gradient.add_(torch.mul(strip.products, strip.left, out=strip.scratch).sum(1))
        return self._gradient.mT


class _Strip(NamedTuple):
    """Views of a triangle's memory for one strip: a in the strip on the left, b from its first row on on the right."""

    left: Tensor
    right: Tensor
    products: Tensor
    scratch: Tensor
    left_gradient: Tensor
    right_gradient: Tensor


def from_tiles(packed: Tensor, feature_dim: int) -> Tensor:
    """Sums in the public layout (G, expanded_size, h) -> (G, triangle_size, h): the mean of x_a x_b and x_b x_a."""
    first, second, _ = _indices(feature_dim, packed.device)
    return (packed[:, first] + packed[:, second]).mul_(0.5)


def from_tiles_backward(gradient: Tensor, feature_dim: int) -> Tensor:
    """The adjoint of `from_tiles`."""
    first, second, _ = _indices(feature_dim, gradient.device)
    packed = gradient.new_zeros(gradient.shape[0], expanded_size(feature_dim, 2), gradient.shape[2])
    return packed.index_add_(1, first, gradient, alpha=0.5).index_add_(1, second, gradient, alpha=0.5)


def to_tiles(sums: Tensor, feature_dim: int) -> Tensor:
    """Sums (G, triangle_size, h) -> the public layout (G, expanded_size, h)."""
    return sums[:, _indices(feature_dim, sums.device)[2]]


def to_tiles_backward(gradient: Tensor, feature_dim: int) -> Tensor:
    """The adjoint of `to_tiles`."""
    padded = feature_dim + -feature_dim % TILE
    sums = gradient.new_zeros(gradient.shape[0], triangle_size(padded), gradient.shape[2])
    return sums.index_add_(1, _indices(feature_dim, gradient.device)[2], gradient)


@cache
def _indices(feature_dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each row here, the public places of (a, b) and (b, a); for each public place, a row here."""
    padded = feature_dim + -feature_dim % TILE
    public = {
        (i * TILE + a, j * TILE + b): (pair * TILE + a) * TILE + b
        for pair, (i, j) in enumerate(tile_pairs(feature_dim))
        for a in range(TILE)
        for b in range(TILE)
    }
    rows = [(first + a, b) for first in range(0, padded, STRIP) for a in range(STRIP) for b in range(first, padded)]
    where = {pair: row for row, pair in enumerate(rows)}
    first = [public[a, b] if (a, b) in public else public[b, a] for a, b in rows]
    second = [public[b, a] if (b, a) in public else public[a, b] for a, b in rows]
    back = [where[a, b] if (a, b) in where else where[b, a] for a, b in public]
    return torch.tensor(first, device=device), torch.tensor(second, device=device), torch.tensor(back, device=device)
