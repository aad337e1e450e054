"""The products x_a x_b, a <= b, as the chunked backend works on them: tokens innermost, close to r (r + 1) / 2 rows.

Rows of x (r, tokens) are cut into strips of 4. Strip I contributes x_a x_b for a in the strip and every b from the
strip's first row on, in row-major order; so a pair within a strip stands twice, every other pair once. With tokens
innermost each product is one long vector operation. The public layout (`tiles.py`) is met only where a state comes in
or goes out.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.linear.tiles import TILE, expanded_size, tile_pairs

STRIP = 4


def triangle_size(feature_dim: int) -> int:
    """Rows of the expansion of `feature_dim` features, a multiple of 4."""
    return sum(STRIP * (feature_dim - first) for first in range(0, feature_dim, STRIP))


class Triangle:
    """Memory for one expansion, with the views of its strips made once: a loop over chunks expands hundreds of times.

    Attributes:
        x: (G, r, T), what is expanded; `load` fills it.
        rows: (G, triangle_size(r), T), the expansion.
    """

    def __init__(self, groups: int, feature_dim: int, tokens: int, like: Tensor):
        self.x = like.new_empty(groups, feature_dim, tokens)
        self.doubled = torch.empty_like(self.x)
        self.rows = like.new_empty(groups, triangle_size(feature_dim), tokens)
        self._strips = list(self._make_strips(feature_dim))

    def _make_strips(self, feature_dim: int) -> Iterator["_Strip"]:
        start = 0
        for first in range(0, feature_dim, STRIP):
            size = STRIP * (feature_dim - first)
            rows = self.rows[:, start : start + size].unflatten(1, (STRIP, -1))
            here, later = slice(first, first + STRIP), slice(first + STRIP, None)
            yield _Strip(
                here=here,
                later=later,
                left=self.x[:, here, None],
                left_doubled=self.doubled[:, here, None],
                right=self.x[:, None, first:],
                inside=rows[:, :, :STRIP],
                across=rows[:, :, STRIP:],
                whole=rows,
            )
            start += size

    def load(self, x: Tensor) -> "Triangle":
        """Take x (G, T, r)."""
        self.x.copy_(x.mT)
        return self

    def expand(self, *, double: bool) -> Tensor:
        """The expansion `rows` of what was loaded, valid until the next one.

        With `double`, products between strips are taken twice: on the query side, so that expansions of a query and of
        a key have the inner product (query . key)^2.
        """
        if not double:
            for strip in self._strips:
                torch.mul(strip.left, strip.right, out=strip.whole)
            return self.rows
        torch.add(self.x, self.x, out=self.doubled)
        for strip in self._strips:
            torch.mul(strip.left, strip.right[:, :, :STRIP], out=strip.inside)
            if strip.across.shape[2]:
                torch.mul(strip.left_doubled, strip.right[:, :, STRIP:], out=strip.across)
        return self.rows

    def contract(self, *, double: bool) -> Tensor:
        """The adjoint: the gradient of what was loaded, (G, T, r), given that of the expansion in `rows`."""
        result = torch.zeros_like(self.x)
        factor = 2.0 if double else 1.0
        for strip in self._strips:
            here = self.x[:, strip.here]
            result[:, strip.here].add_((strip.inside * here[:, None]).sum(2))
            result[:, strip.here].add_((strip.inside * here[:, :, None]).sum(1))
            if strip.across.shape[2]:
                result[:, strip.here].add_((strip.across * self.x[:, None, strip.later]).sum(2), alpha=factor)
                result[:, strip.later].add_((strip.across * here[:, :, None]).sum(1), alpha=factor)
        return result.mT


class _Strip(NamedTuple):
    """Views of a triangle's memory for the strip whose rows are `here`; `later` are all rows after it."""

    here: slice
    later: slice
    left: Tensor
    left_doubled: Tensor
    right: Tensor
    inside: Tensor
    across: Tensor
    whole: Tensor


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
    first = [public.get((a, b), public.get((b, a))) for a, b in rows]
    second = [public.get((b, a), public.get((a, b))) for a, b in rows]
    back = [where.get((a, b), where.get((b, a))) for a, b in public]
    return tuple(torch.tensor(values, device=device) for values in (first, second, back))
