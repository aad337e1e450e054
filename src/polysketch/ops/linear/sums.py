"""Running sums over expanded features: reading them, folding tokens into them, and the adjoints of both.

Shape legend: G groups (batch x key head), R query rows, T tokens, r features (padded at power 2), e expanded, h value.

    fold:  S += E(K)^T V              z += sum of E(K)
    read:  numerator = E(Q) (w * S)   denominator = E(Q) (w * z)

What E, the weights w and the form of z are, `expansions.py` says.

A gradient with respect to sums is a `Sums` as well, of E(Q)^T dN: the gradient of S is w times that.
"""

import torch
from torch import Tensor

from polysketch.ops.linear.expansions import Pair, expansion
from polysketch.ops.workspace import Workspace


class Sums:
    """S (G, e, h) and z, zeros at first, changed in place.

    Args:
        like: a tensor of the dtype and device to use.
        groups, feature_dim, value_dim: G, r before padding, h.
        power, factors: as in `linear_attention`.
        workspace: scratch memory.
    """

    def __init__(
        self,
        like: Tensor,
        groups: int,
        feature_dim: int,
        value_dim: int,
        power: int,
        factors: int,
        workspace: Workspace,
    ) -> None:
        self.expansion = expansion(like, feature_dim, power, factors, workspace)
        self.sums = like.new_zeros(groups, self.expansion.rows, value_dim)
        self.normalizer = like.new_zeros(groups, *self.expansion.normalizer_shape)
        self.workspace = workspace
        self.empty = True
        self._weighted: Tensor | None = None

    def load(self, sums: Tensor, normalizer: Tensor) -> None:
        """Start from sums (G, e, h) and normalizer (G, e) in the public layout."""
        self._set(*self.expansion.load(sums, normalizer))

    def packed(self) -> Pair:
        """S and z in the public layout, (G, e, h) and (G, e)."""
        return self.expansion.packed(self.sums, self.normalizer)

    def load_gradient(self, sums: Tensor, normalizer: Tensor) -> None:
        """Start from gradients with respect to what `packed` gave."""
        self._set(*self.expansion.load_gradient(sums, normalizer))

    def packed_gradient(self) -> Pair:
        """Gradients with respect to what was given to `load`, (G, e, h) and (G, e)."""
        return self.expansion.packed_gradient(self._readable(), self.normalizer)

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

    def read(self, query: Tensor) -> Pair:
        """query (G, R, r) -> numerator (G, R, h), denominator (G, R); the numerator is void at the next read."""
        numerator = self.workspace.take("numerator", (*query.shape[:2], self.sums.shape[2]), query)
        if self.empty:
            return numerator.zero_(), query.new_zeros(query.shape[:2])
        torch.bmm(self.expansion.expanded(query).mT, self._readable(), out=numerator)
        return numerator, self.expansion.mass(query, self.normalizer)

    def fold(self, key: Tensor, value: Tensor, factor: Tensor | None) -> None:
        """Add key (G, T, r) and value (G, T, h), each token times `factor` (G, T) where that is given."""
        scaled = key if factor is None else key * factor[..., None]
        self.sums.baddbmm_(self.expansion.expanded(key), value if factor is None else value * factor[..., None])
        self.expansion.add_mass(self.normalizer, key, scaled)
        self._changed()

    def read_backward(self, query: Tensor, numerator_gradient: Tensor, denominator_gradient: Tensor) -> Tensor:
        """The gradient of `read` with respect to the query, (G, R, r)."""
        if self.empty:
            return torch.zeros_like(query)
        through_mass = self.expansion.mass_gradient(query, self.normalizer) * denominator_gradient[..., None]
        return through_mass.add_(self.expansion.contracted(query, self._readable(), numerator_gradient))

    def add_read_gradient(self, query: Tensor, numerator_gradient: Tensor, denominator_gradient: Tensor) -> None:
        """Of `self` as a gradient: add that of one `read`."""
        self.sums.baddbmm_(self.expansion.expanded(query), numerator_gradient)
        self.expansion.add_mass(self.normalizer, query, query * denominator_gradient[..., None])
        self._changed()

    def fold_backward(self, key: Tensor, value: Tensor, factor: Tensor | None) -> Pair:
        """Of `self` as the gradient after a `fold`: the gradients of that fold's key (G, T, r) and value (G, T, h)."""
        if self.empty:
            return torch.zeros_like(key), torch.zeros_like(value)
        value_gradient = torch.bmm(self.expansion.expanded(key).mT, self._readable())
        key_gradient = self.expansion.contracted(key, self._readable(), value)
        key_gradient = key_gradient + self.expansion.mass_gradient(key, self.normalizer)
        if factor is None:
            return key_gradient, value_gradient
        return key_gradient * factor[..., None], value_gradient * factor[..., None]

    def _readable(self) -> Tensor:
        """w * S, made once between two changes."""
        if self.expansion.weights is None:
            return self.sums
        if self._weighted is None:
            memory = self.workspace.take("weighted sums", tuple(self.sums.shape), self.sums)
            self._weighted = torch.mul(self.sums, self.expansion.weights, out=memory)
        return self._weighted
