"""The products x_a x_b as backends keep their sums, in rows: each pair once, or nearly; the way to the public tiles.

The native backend has a row for each pair a <= b: (0, 0), (0, 1), ..., (0, r - 1), (1, 1), ...; r (r + 1) / 2 rows,
where tiles have about r^2 / 2 + 8 r.

The chunked backend has tokens innermost, so that each product is one long vector operation. Rows of x (r, tokens) are
cut into strips of 4. Strip I contributes x_a x_b for a in the strip and every b from the strip's first row on, in
row-major order; so a pair within a strip stands twice, every other pair once.

The public layout (`packing.py`) is met only where a state comes in or goes out.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.linear.packing import TILE, expanded_size, tile_pairs

STRIP = 4


class Rows:
    """The way of sums between the rows of a backend and the public tiles, with both adjoints.

    Args:
        pairs: (a, b) of each row.
        feature_dim: r.
        device: where the sums are.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]], feature_dim: int, device: torch.device) -> None:
        place = {
            (i * TILE + a, j * TILE + b): (tile * TILE + a) * TILE + b
            for tile, (i, j) in enumerate(tile_pairs(feature_dim))
            for a in range(TILE)
            for b in range(TILE)
        }
        row = {pair: index for index, pair in enumerate(pairs)}
        rows = [row.get((a, b), row.get((b, a), len(pairs))) for a, b in place]
        self._size, self._public_size = len(pairs), expanded_size(feature_dim, 2, 1)
        self._padded = len(pairs) in rows
        # A tile on the diagonal has two places for a pair, (a, b) and (b, a); other tiles have one, taken twice.
        self._first = torch.tensor([place[pair] for pair in pairs], device=device)
        self._second = torch.tensor([place.get((b, a), place[a, b]) for a, b in pairs], device=device)
        self._back = torch.tensor(rows, device=device)

    def from_tiles(self, packed: Tensor) -> Tensor:
        """Sums in the public layout (..., expanded_size, h) -> (..., rows, h): the mean of a pair's two places."""
        return (packed[..., self._first, :] + packed[..., self._second, :]).mul_(0.5)

    def from_tiles_backward(self, gradient: Tensor) -> Tensor:
        """The adjoint of `from_tiles`."""
        packed = gradient.new_zeros(*gradient.shape[:-2], self._public_size, gradient.shape[-1])
        return packed.index_add_(-2, self._first, gradient, alpha=0.5).index_add_(-2, self._second, gradient, alpha=0.5)

    def to_tiles(self, sums: Tensor) -> Tensor:
        """Sums (..., rows, h) -> the public layout, zero where features are padding that has no row."""
        return (torch.nn.functional.pad(sums, (0, 0, 0, 1)) if self._padded else sums)[..., self._back, :]

    def to_tiles_backward(self, gradient: Tensor) -> Tensor:
        """The adjoint of `to_tiles`."""
        sums = gradient.new_zeros(*gradient.shape[:-2], self._size + self._padded, gradient.shape[-1])
        return sums.index_add_(-2, self._back, gradient)[..., : self._size, :].contiguous()


def num_pairs(feature_dim: int) -> int:
    """Rows of the native backend."""
    return feature_dim * (feature_dim + 1) // 2


@cache
def pair_rows(feature_dim: int, device: torch.device) -> Rows:
    """The rows of the native backend."""
    return Rows([(a, b) for a in range(feature_dim) for b in range(a, feature_dim)], feature_dim, device)


@cache
def strip_rows(feature_dim: int, device: torch.device) -> Rows:
    """The rows of the chunked backend, whose features are padded to whole tiles."""
    return Rows(_strip_pairs(feature_dim + -feature_dim % TILE), feature_dim, device)


def _strip_pairs(feature_dim: int) -> list[tuple[int, int]]:
    strips = range(0, feature_dim, STRIP)
    return [(first + a, b) for first in strips for a in range(STRIP) for b in range(first, feature_dim)]


@cache
def square_rows(feature_dim: int) -> list[int]:
    """Where the chunked backend has the squares of `feature_dim` features, a multiple of 4."""
    return [row for row, (a, b) in enumerate(_strip_pairs(feature_dim)) if a == b]


def triangle_size(feature_dim: int) -> int:
    """Rows of the chunked backend for `feature_dim` features, a multiple of 4."""
    return sum(STRIP * (feature_dim - first) for first in range(0, feature_dim, STRIP))


def weights(feature_dim: int, like: Tensor) -> Tensor:
    """(triangle_size, 1): 1 for products within a strip, 2 for those between strips, so that

    (x . y)^2 = sum over rows of weight * expansion of x * expansion of y.
    """
    return like.new_tensor([1.0 if b < a - a % STRIP + STRIP else 2.0 for a, b in _strip_pairs(feature_dim)])[:, None]


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
