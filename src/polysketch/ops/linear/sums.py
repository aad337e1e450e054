"""Running sums over expanded features: reading them, folding tokens into them, and the adjoints of both.

Shape legend: G groups (batch x key head), R query rows, T tokens, r features (padded at power 2), e expanded, h value.

    fold:  S += E(K)^T V      z += sum of E(K)
    read:  numerator = E(Q) S     denominator = E(Q) z

At power 1, E is the identity. At power 2, E is the expansion of `triangle.py`, kept with tokens innermost, and z is
kept as the r x r matrix K^T K, for then the denominator is a small matrix product.

`Sums` is a value that these change in place; a gradient with respect to sums is a `Sums` as well.
"""

import torch
from torch import Tensor

from polysketch.ops.linear import tiles, triangle
from polysketch.ops.linear.workspace import Workspace


class Sums:
    """S (G, e, h) and z: (G, r) at power 1, (G, r, r) at power 2."""

    def __init__(self, sums: Tensor, normalizer: Tensor, feature_dim: int, power: int, workspace: Workspace):
        self.sums = sums
        self.normalizer = normalizer
        self.feature_dim = feature_dim
        self.power = power
        self.workspace = workspace

    @classmethod
    def zeros(cls, like: Tensor, groups: int, feature_dim: int, value_dim: int, power: int, workspace: Workspace):
        """Empty sums, in the dtype and on the device of `like`."""
        padded = feature_dim + -feature_dim % tiles.TILE
        expanded = feature_dim if power == 1 else triangle.triangle_size(padded)
        normalizer = like.new_zeros(groups, feature_dim) if power == 1 else like.new_zeros(groups, padded, padded)
        return cls(like.new_zeros(groups, expanded, value_dim), normalizer, feature_dim, power, workspace)

    def load(self, sums: Tensor, normalizer: Tensor) -> None:
        """Start from sums (G, e, h) and normalizer (G, e) in the public layout."""
        if self.power == 1:
            self.sums.copy_(sums)
            self.normalizer.copy_(normalizer)
        else:
            self.sums.copy_(triangle.from_tiles(sums, self.feature_dim))
            self.normalizer.copy_(tiles.unpack_matrix(normalizer, self.feature_dim))

    def packed_sums(self) -> Tensor:
        """S in the public layout (G, e, h)."""
        return self.sums if self.power == 1 else triangle.to_tiles(self.sums, self.feature_dim)

    def packed_normalizer(self) -> Tensor:
        """z in the public layout (G, e)."""
        return self.normalizer if self.power == 1 else tiles.pack_matrix(self.normalizer)

    def load_gradient(self, sums: Tensor, normalizer: Tensor) -> None:
        """Start from gradients with respect to what `packed_sums` and `packed_normalizer` gave."""
        if self.power == 1:
            self.sums.copy_(sums)
            self.normalizer.copy_(normalizer)
            return
        self.sums.copy_(triangle.to_tiles_backward(sums, self.feature_dim))
        self.normalizer.zero_()
        blocks = self.normalizer.unflatten(-1, (-1, tiles.TILE)).unflatten(-3, (-1, tiles.TILE))
        for index, (i, j) in enumerate(tiles.tile_pairs(self.feature_dim)):
            blocks[..., i, :, j, :] = normalizer.unflatten(-1, (-1, tiles.TILE, tiles.TILE))[..., index, :, :]

    def sums_gradient(self) -> Tensor:
        """The gradient with respect to the `sums` given to `load`, (G, e, h)."""
        return self.sums if self.power == 1 else triangle.from_tiles_backward(self.sums, self.feature_dim)

    def normalizer_gradient(self) -> Tensor:
        """The gradient with respect to the `normalizer` given to `load`, (G, e)."""
        return self.normalizer if self.power == 1 else tiles.unpack_matrix_backward(self.normalizer)

    def decay(self, factor: Tensor) -> None:
        """Multiply everything by `factor` (G,)."""
        self.sums.mul_(factor[:, None, None])
        self.normalizer.mul_(factor.reshape(-1, *[1] * (self.normalizer.dim() - 1)))

    def read(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """query (G, R, r) -> numerator (G, R, h), denominator (G, R)."""
        numerator = self.workspace.take("numerator", (*query.shape[:2], self.sums.shape[2]), query)
        torch.bmm(self._expanded(query, query_side=True).mT, self.sums, out=numerator)
        if self.power == 1:
            return numerator, torch.bmm(query, self.normalizer[..., None])[..., 0]
        return numerator, torch.bmm(query, self.normalizer).mul_(query).sum(-1)

    def fold(self, key: Tensor, value: Tensor, factor: Tensor | None) -> None:
        """Add key (G, T, r) and value (G, T, h), each token times `factor` (G, T) where that is given."""
        scaled = key if factor is None else key * factor[..., None]
        weighted = value if factor is None else value * factor[..., None]
        self.sums.baddbmm_(self._expanded(key, query_side=False), weighted)
        if self.power == 1:
            self.normalizer.add_(scaled.sum(1))
        else:
            self.normalizer.baddbmm_(scaled.mT, key)

    def read_backward(self, query: Tensor, numerator_gradient: Tensor, denominator_gradient: Tensor) -> Tensor:
        """The gradient of `read` with respect to the query, (G, R, r)."""
        if self.power == 1:
            through_sums = torch.bmm(numerator_gradient, self.sums.mT)
            return through_sums.add_(denominator_gradient[..., None] * self.normalizer[:, None])
        both = torch.bmm(query, self.normalizer + self.normalizer.mT).mul_(denominator_gradient[..., None])
        return both.add_(self._contracted(query, numerator_gradient, query_side=True))

    def add_read_gradient(self, query: Tensor, numerator_gradient: Tensor, denominator_gradient: Tensor) -> None:
        """Of `self` as a gradient: add that of one `read`."""
        self.sums.baddbmm_(self._expanded(query, query_side=True), numerator_gradient)
        weighted = query * denominator_gradient[..., None]
        if self.power == 1:
            self.normalizer.add_(weighted.sum(1))
        else:
            self.normalizer.baddbmm_(weighted.mT, query)

    def fold_backward(self, key: Tensor, value: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of `self` as the gradient after a `fold`: the gradients of that fold's key (G, T, r) and value (G, T, h)."""
        value_gradient = torch.bmm(self._expanded(key, query_side=False).mT, self.sums)
        if self.power == 1:
            key_gradient = torch.bmm(value, self.sums.mT).add_(self.normalizer[:, None])
        else:
            key_gradient = torch.bmm(key, self.normalizer + self.normalizer.mT)
            key_gradient.add_(self._contracted(key, value, query_side=False))
        if factor is None:
            return key_gradient, value_gradient
        return key_gradient * factor[..., None], value_gradient * factor[..., None]

    def _expanded(self, x: Tensor, *, query_side: bool) -> Tensor:
        """E(x)^T, (G, e, tokens)."""
        return x.mT if self.power == 1 else self.workspace.triangle(x).load(x).expand(double=query_side)

    def _contracted(self, x: Tensor, gradient: Tensor, *, query_side: bool) -> Tensor:
        """The gradient of `_expanded(x)` is S times `gradient` (G, tokens, h); that of x, (G, tokens, r)."""
        triangle = self.workspace.triangle(x).load(x)
        torch.bmm(self.sums, gradient.mT, out=triangle.rows)
        return triangle.contract(double=query_side)
