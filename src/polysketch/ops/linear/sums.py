"""Running sums over expanded features: reading them, folding tokens into them, and the adjoints of both.

Shape legend: G groups (batch x key head), R query rows, T tokens, r features (padded at power 2), e expanded, h value.

    fold:  S += E(K)^T V              z += sum of E(K)
    read:  numerator = E(Q) (w * S)   denominator = E(Q) (w * z)

At power 1, E is the identity and w = 1. At power 2, E is the expansion of `packing_rows.py` in strips, kept with tokens
innermost, w its weights, and z is kept as the r x r matrix K^T K, for then the denominator is a small matrix product.

A gradient with respect to sums is a `Sums` as well, of E(Q)^T dN: the gradient of S is w times that.
"""

from functools import partial

import torch
from torch import Tensor

from polysketch.ops.linear import packing
from polysketch.ops.linear.packing_rows import Rows, Triangle, strip_rows, triangle_size, weights
from polysketch.ops.workspace import Workspace


class Sums:
    """S (G, e, h) and z, (G, r) at power 1 and (G, r, r) at power 2; zeros at first, changed in place.

    Args:
        like: a tensor of the dtype and device to use.
        groups, feature_dim, value_dim: G, r before padding, h.
        power: 1 or 2.
        workspace: scratch memory.
    """

    def __init__(
        self, like: Tensor, groups: int, feature_dim: int, value_dim: int, power: int, workspace: Workspace
    ) -> None:
        padded = feature_dim + -feature_dim % packing.TILE
        rows = feature_dim if power == 1 else triangle_size(padded)
        self.sums = like.new_zeros(groups, rows, value_dim)
        self.normalizer = like.new_zeros(groups, feature_dim) if power == 1 else like.new_zeros(groups, padded, padded)
        self.feature_dim, self.power, self.workspace = feature_dim, power, workspace
        self.empty = True
        self._weights = None if power == 1 else weights(padded, like)
        self._weighted: Tensor | None = None

    def load(self, sums: Tensor, normalizer: Tensor) -> None:
        """Start from sums (G, e, h) and normalizer (G, e) in the public layout."""
        if self.power == 2:
            sums = self._rows().from_tiles(sums)
            normalizer = packing.unpack_matrix(self._symmetric(normalizer), self.feature_dim)
        self._set(sums, normalizer)

    def packed(self) -> tuple[Tensor, Tensor]:
        """S and z in the public layout, (G, e, h) and (G, e)."""
        if self.power == 1:
            return self.sums, self.normalizer
        return self._rows().to_tiles(self.sums), packing.pack_matrix(self.normalizer)

    def load_gradient(self, sums: Tensor, normalizer: Tensor) -> None:
        """Start from gradients with respect to what `packed` gave."""
        if self._weights is not None:
            sums = self._rows().to_tiles_backward(sums) / self._weights
            normalizer = packing.pack_matrix_backward(normalizer, self.feature_dim)
        self._set(sums, normalizer)

    def packed_gradient(self) -> tuple[Tensor, Tensor]:
        """Gradients with respect to what was given to `load`, (G, e, h) and (G, e)."""
        if self.power == 1:
            return self.sums, self.normalizer
        sums = self._rows().from_tiles_backward(self._readable())
        return sums, self._symmetric(packing.unpack_matrix_backward(self.normalizer))

    def _rows(self) -> Rows:
        return strip_rows(self.feature_dim, self.sums.device)

    def _symmetric(self, packed: Tensor) -> Tensor:
        """z (G, e) with the mean of x_a x_b and x_b x_a; its own adjoint."""
        return packing.symmetrize(packed[..., None], self.feature_dim)[..., 0]

    def _set(self, sums: Tensor, normalizer: Tensor) -> None:
        self.sums.copy_(sums)
        self.normalizer.copy_(normalizer)
        self._changed()

    def _changed(self) -> None:
        self.empty, self._weighted = False, None

    def decay(self, factor: Tensor) -> None:
        """Multiply everything by `factor` (G,)."""
        if not self.empty:
            self.sums.mul_(factor[:, None, None])
            self.normalizer.mul_(factor.reshape(-1, *[1] * (self.normalizer.dim() - 1)))
            self._changed()

    def read(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """query (G, R, r) -> numerator (G, R, h), denominator (G, R); the numerator is void at the next read."""
        numerator = self.workspace.take("numerator", (*query.shape[:2], self.sums.shape[2]), query)
        if self.empty:
            return numerator.zero_(), query.new_zeros(query.shape[:2])
        torch.bmm(self._expanded(query).mT, self._readable(), out=numerator)
        if self.power == 1:
            return numerator, torch.bmm(query, self.normalizer[..., None])[..., 0]
        return numerator, torch.bmm(query, self.normalizer).mul_(query).sum(-1)

    def fold(self, key: Tensor, value: Tensor, factor: Tensor | None) -> None:
        """Add key (G, T, r) and value (G, T, h), each token times `factor` (G, T) where that is given."""
        scaled = key if factor is None else key * factor[..., None]
        self.sums.baddbmm_(self._expanded(key), value if factor is None else value * factor[..., None])
        if self.power == 1:
            self.normalizer.add_(scaled.sum(1))
        else:
            self.normalizer.baddbmm_(scaled.mT, key)
        self._changed()

    def read_backward(self, query: Tensor, numerator_gradient: Tensor, denominator_gradient: Tensor) -> Tensor:
        """The gradient of `read` with respect to the query, (G, R, r)."""
        if self.empty:
            return torch.zeros_like(query)
        if self.power == 1:
            through_sums = torch.bmm(numerator_gradient, self.sums.mT)
            return through_sums.add_(denominator_gradient[..., None] * self.normalizer[:, None])
        both = torch.bmm(query, self.normalizer + self.normalizer.mT).mul_(denominator_gradient[..., None])
        return both.add_(self._contracted(query, numerator_gradient))

    def add_read_gradient(self, query: Tensor, numerator_gradient: Tensor, denominator_gradient: Tensor) -> None:
        """Of `self` as a gradient: add that of one `read`."""
        self.sums.baddbmm_(self._expanded(query), numerator_gradient)
        weighted = query * denominator_gradient[..., None]
        if self.power == 1:
            self.normalizer.add_(weighted.sum(1))
        else:
            self.normalizer.baddbmm_(weighted.mT, query)
        self._changed()

    def fold_backward(self, key: Tensor, value: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of `self` as the gradient after a `fold`: the gradients of that fold's key (G, T, r) and value (G, T, h)."""
        if self.empty:
            return torch.zeros_like(key), torch.zeros_like(value)
        value_gradient = torch.bmm(self._expanded(key).mT, self._readable())
        if self.power == 1:
            key_gradient = torch.bmm(value, self.sums.mT).add_(self.normalizer[:, None])
        else:
            key_gradient = torch.bmm(key, self.normalizer + self.normalizer.mT)
            key_gradient.add_(self._contracted(key, value))
        if factor is None:
            return key_gradient, value_gradient
        return key_gradient * factor[..., None], value_gradient * factor[..., None]

    def _readable(self) -> Tensor:
        """w * S, made once between two changes."""
        if self._weights is None:
            return self.sums
        if self._weighted is None:
            memory = self.workspace.take("weighted sums", tuple(self.sums.shape), self.sums)
            self._weighted = torch.mul(self.sums, self._weights, out=memory)
        return self._weighted

    def _expanded(self, x: Tensor) -> Tensor:
        """E(x)^T, (G, e, tokens)."""
        return x.mT if self.power == 1 else self._triangle(x).expand()

    def _contracted(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of `_expanded(x)` is w * S times `gradient` (G, tokens, h); that of x, (G, tokens, r)."""
        triangle = self._triangle(x)
        torch.bmm(self._readable(), gradient.mT, out=triangle.rows)
        return triangle.contract()

    def _triangle(self, x: Tensor) -> Triangle:
        """Memory for expanding x (G, tokens, r), with x in it; the last one of this shape is void."""
        groups, tokens, features = x.shape
        make = partial(Triangle, groups, features, tokens, x)
        return self.workspace.kept(("triangle", groups, tokens, features), make).load(x)
