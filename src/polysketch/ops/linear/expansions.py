"""What the chunked backend's sums are made of, E(x): the features, their squares, or the products of their halves.

Shape legend as in `sums.py`: G groups, T tokens, r features, e expanded, h value.

The normalizer z, the sum of E(k), is (G, r) where E is the identity. Otherwise it is a matrix, left(k)^T right(k) added
up: then a mass E(q) . z is the small product left(q) z, times right(q), and no expansion is needed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from polysketch.ops.linear import packing
from polysketch.ops.linear.packing_rows import Rows, Triangle, square_rows, strip_rows, triangle_size, weights
from polysketch.ops.workspace import Workspace

Pair = tuple[Tensor, Tensor]
"""Sums (G, e, h) and a normalizer."""


class Expansion(ABC):
    """E at one width of features.

    Attributes:
        rows: e, as it is kept here.
        normalizer_shape: of z, without G.
        weights: (e, 1), with which products count on the query's side; None where each counts once.
        squares: at power 2, the rows of the squares of the features.
    """

    rows: int
    normalizer_shape: tuple[int, ...]
    weights: Tensor | None = None
    squares: Sequence[int] = ()

    @abstractmethod
    def expanded(self, x: Tensor) -> Tensor:
        """x (G, T, r) -> E(x)^T (G, e, T), valid until the next call."""

    @abstractmethod
    def contracted(self, x: Tensor, sums: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of x (G, T, r), where that of E(x) is `gradient` (G, T, h) times the weighted `sums`."""

    @abstractmethod
    def mass(self, x: Tensor, normalizer: Tensor) -> Tensor:
        """E(x) . z, (G, T)."""

    @abstractmethod
    def mass_gradient(self, x: Tensor, normalizer: Tensor) -> Tensor:
        """The gradient of `mass` with respect to x, to be broadcast to (G, T, r)."""

    @abstractmethod
    def mass_of(self, x: Tensor, scaled: Tensor) -> Tensor:
        """E(x) of all tokens added up, in the form of z; each token counts as often as `scaled` is x."""

    def load(self, sums: Tensor, normalizer: Tensor) -> Pair:
        """From the public layout."""
        return sums, normalizer.unflatten(1, self.normalizer_shape)

    def packed(self, sums: Tensor, normalizer: Tensor) -> Pair:
        """To the public layout."""
        return sums, normalizer.flatten(1)

    def load_gradient(self, sums: Tensor, normalizer: Tensor) -> Pair:
        """The adjoint of `packed`, weights left out."""
        return self.load(sums, normalizer)

    def packed_gradient(self, sums: Tensor, normalizer: Tensor) -> Pair:
        """The adjoint of `load`; `sums` come weighted."""
        return self.packed(sums, normalizer)


class Features(Expansion):
    """Power 1: E is the identity."""

    def __init__(self, feature_dim: int) -> None:
        self.rows, self.normalizer_shape = feature_dim, (feature_dim,)

    def expanded(self, x: Tensor) -> Tensor:
        """As `Expansion.expanded`."""
        return x.mT

    def contracted(self, x: Tensor, sums: Tensor, gradient: Tensor) -> Tensor:
        """As `Expansion.contracted`."""
        return torch.bmm(gradient, sums.mT)

    def mass(self, x: Tensor, normalizer: Tensor) -> Tensor:
        """As `Expansion.mass`."""
        return torch.bmm(x, normalizer[..., None])[..., 0]

    def mass_gradient(self, x: Tensor, normalizer: Tensor) -> Tensor:
        """As `Expansion.mass_gradient`."""
        return normalizer[:, None]

    def mass_of(self, x: Tensor, scaled: Tensor) -> Tensor:
        """As `Expansion.mass_of`."""
        return scaled.sum(1)


class Squares(Expansion):
    """Power 2: E is the expansion of `packing_rows.py` in strips, tokens innermost, and z is K^T K."""

    def __init__(self, feature_dim: int, like: Tensor, workspace: Workspace) -> None:
        padded = feature_dim + -feature_dim % packing.TILE
        self.rows, self.normalizer_shape = triangle_size(padded), (padded, padded)
        self.weights = self._weights = weights(padded, like)
        self.squares = square_rows(padded)
        self._feature_dim, self._workspace = feature_dim, workspace

    def expanded(self, x: Tensor) -> Tensor:
        """As `Expansion.expanded`."""
        return self._triangle(x).expand()

    def contracted(self, x: Tensor, sums: Tensor, gradient: Tensor) -> Tensor:
        """As `Expansion.contracted`."""
        triangle = self._triangle(x)
        torch.bmm(sums, gradient.mT, out=triangle.rows)
        return triangle.contract()

    def mass(self, x: Tensor, normalizer: Tensor) -> Tensor:
        """As `Expansion.mass`."""
        return torch.bmm(x, normalizer).mul_(x).sum(-1)

    def mass_gradient(self, x: Tensor, normalizer: Tensor) -> Tensor:
        """As `Expansion.mass_gradient`."""
        return torch.bmm(x, normalizer + normalizer.mT)

    def mass_of(self, x: Tensor, scaled: Tensor) -> Tensor:
        """As `Expansion.mass_of`."""
        return torch.bmm(scaled.mT, x)

    def load(self, sums: Tensor, normalizer: Tensor) -> Pair:
        """As `Expansion.load`."""
        matrix = packing.unpack_matrix(self._symmetric(normalizer), self._feature_dim)
        return self._rows(sums).from_tiles(sums), matrix

    def packed(self, sums: Tensor, normalizer: Tensor) -> Pair:
        """As `Expansion.packed`."""
        return self._rows(sums).to_tiles(sums), packing.pack_matrix(normalizer)

    def load_gradient(self, sums: Tensor, normalizer: Tensor) -> Pair:
        """As `Expansion.load_gradient`."""
        matrix = packing.pack_matrix_backward(normalizer, self._feature_dim)
        return self._rows(sums).to_tiles_backward(sums) / self._weights, matrix

    def packed_gradient(self, sums: Tensor, normalizer: Tensor) -> Pair:
        """As `Expansion.packed_gradient`."""
        packed = self._symmetric(packing.unpack_matrix_backward(normalizer))
        return self._rows(sums).from_tiles_backward(sums), packed

    def _rows(self, sums: Tensor) -> Rows:
        return strip_rows(self._feature_dim, sums.device)

    def _symmetric(self, packed: Tensor) -> Tensor:
        """z (G, e) with the mean of x_a x_b and x_b x_a; its own adjoint."""
        return packing.symmetrize(packed[..., None], self._feature_dim)[..., 0]

    def _triangle(self, x: Tensor) -> Triangle:
        """Memory for expanding x (G, tokens, r), with x in it; the last one of this shape is void."""
        groups, tokens, features = x.shape
        make = partial(Triangle, groups, features, tokens, x)
        return self._workspace.kept(("triangle", groups, tokens, features), make).load(x)


class Products(Expansion):
    """Two factors: x is the halves (a, b), E the products a_i b_j, i major, tokens innermost, and z is A^T B."""

    def __init__(self, feature_dim: int, workspace: Workspace) -> None:
        self._width, self._workspace = feature_dim // 2, workspace
        self.rows, self.normalizer_shape = self._width**2, (self._width, self._width)

    def expanded(self, x: Tensor) -> Tensor:
        """As `Expansion.expanded`."""
        rows = self._memory("products", x)
        first, second = x.mT.contiguous().chunk(2, 1)
        torch.mul(first[:, :, None], second[:, None], out=rows.unflatten(1, (self._width, -1)))
        return rows

    def contracted(self, x: Tensor, sums: Tensor, gradient: Tensor) -> Tensor:
        """As `Expansion.contracted`."""
        rows = self._memory("products", x)
        change = torch.bmm(sums, gradient.mT, out=rows).unflatten(1, (self._width, -1))
        scratch = self._memory("scratch products", x).view(change.shape)
        first, second = x.mT.contiguous().chunk(2, 1)
        of_first = torch.mul(change, second[:, None], out=scratch).sum(2)
        of_second = torch.mul(change, first[:, :, None], out=scratch).sum(1)
        return torch.cat([of_first, of_second], 1).mT

    def mass(self, x: Tensor, normalizer: Tensor) -> Tensor:
        """As `Expansion.mass`."""
        first, second = x.chunk(2, -1)
        return torch.bmm(first, normalizer).mul_(second).sum(-1)

    def mass_gradient(self, x: Tensor, normalizer: Tensor) -> Tensor:
        """As `Expansion.mass_gradient`."""
        first, second = x.chunk(2, -1)
        return torch.cat([torch.bmm(second, normalizer.mT), torch.bmm(first, normalizer)], -1)

    def mass_of(self, x: Tensor, scaled: Tensor) -> Tensor:
        """As `Expansion.mass_of`."""
        return torch.bmm(scaled[..., : self._width].mT, x[..., self._width :])

    def _memory(self, name: str, x: Tensor) -> Tensor:
        return self._workspace.take(name, (x.shape[0], self.rows, x.shape[1]), x)


def expansion(like: Tensor, feature_dim: int, power: int, factors: int, workspace: Workspace) -> Expansion:
    """E for features of this width, power and number of factors; `like` has the dtype and device to use."""
    if factors == 2:
        return Products(feature_dim, workspace)
    return Features(feature_dim) if power == 1 else Squares(feature_dim, like, workspace)
