"""Running sums over expanded features: reading them, folding tokens into them, and the adjoints of both.

Shape legend: G groups (batch x key head), R query rows, T tokens, r features (padded at power 2), e expanded, h value.

    fold:  S += E(K)^T V              z += sum of E(K)
    read:  numerator = E(Q) (w * S)   denominator = E(Q) (w * z)

What E, the weights w and the form of z are, `expansions.py` says.

What up to `_RECENT` tokens add is summed by itself first. The sums of all are kept in float64 and read in their own
dtype: what the addition of a chunk rounds off does not add up over the length.

A gradient with respect to sums is a `Sums` as well, of E(Q)^T dN: the gradient of S is w times that.
"""

import torch
from torch import Tensor

from polysketch.ops.linear.expansions import Pair, expansion
from polysketch.ops.linear.state import adding_dtype
from polysketch.ops.workspace import Workspace

_RECENT = 1024


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
        # Of both; the same tensors where they are in float64, or where a device has none.
        self._exact = [x.to(adding_dtype(like)) for x in (self.sums, self.normalizer)]
        self._recent: list[Tensor] = []
        self._recent_tokens = 0
        self.workspace = workspace
        self.empty = True
        self._weighted: Tensor | None = None

    def load(self, sums: Tensor, normalizer: Tensor) -> None:
        """Start from sums (G, e, h) and normalizer (G, e) in the public layout."""
        self._set(*self.expansion.load(sums, normalizer))

    def packed(self) -> Pair:
        """S and z in the public layout, (G, e, h) and (G, e)."""
        self._settle()
        return self.expansion.packed(self.sums, self.normalizer)

    def load_gradient(self, sums: Tensor, normalizer: Tensor) -> None:
        """Start from gradients with respect to what `packed` gave."""
        self._set(*self.expansion.load_gradient(sums, normalizer))

    def packed_gradient(self) -> Pair:
        """Gradients with respect to what was given to `load`, (G, e, h) and (G, e)."""
        readable = self._readable()
        return self.expansion.packed_gradient(readable, self.normalizer)

    def _set(self, sums: Tensor, normalizer: Tensor) -> None:
        self._recent_tokens = 0
        for exact, given in zip(self._exact, (sums, normalizer), strict=True):
            exact.copy_(given)
        self._changed()

    def _changed(self) -> None:
        for exact, rounded in zip(self._exact, (self.sums, self.normalizer), strict=True):
            if exact is not rounded:
                rounded.copy_(exact)
        self.empty, self._weighted = False, None

    def _add(self, x: Tensor, values: Tensor, of_mass: Tensor) -> None:
        """Add E(x)^T values and, as often as `of_mass` is x, E(x)."""
        if not self._recent:
            self._recent = [torch.empty_like(self.sums), torch.empty_like(self.normalizer)]
        sums, normalizer = self._recent
        kept = 1 if self._recent_tokens else 0
        torch.baddbmm(sums, self.expansion.expanded(x), values, beta=kept, out=sums)
        mass = self.expansion.mass_of(x, of_mass)
        normalizer.add_(mass) if kept else normalizer.copy_(mass)
        self.empty = False
        self._recent_tokens += x.shape[1]
        if self._recent_tokens >= _RECENT:
            self._settle()

    def _settle(self) -> None:
        """Add what came lately to the sums of all."""
        if not self._recent_tokens:
            return
        for exact, recent in zip(self._exact, self._recent, strict=True):
            exact.add_(recent)
        self._recent_tokens = 0
        self._changed()

    def decay(self, factor: Tensor) -> None:
        """Multiply everything by `factor` (G,)."""
        if not self.empty:
            self._settle()
            for exact in self._exact:
                exact.mul_(factor.reshape(-1, *[1] * (exact.dim() - 1)))
            self._changed()

    def read(self, query: Tensor) -> Pair:
        """query (G, R, r) -> numerator (G, R, h), denominator (G, R); the numerator is void at the next read."""
        numerator = self.workspace.take("numerator", (*query.shape[:2], self.sums.shape[2]), query)
        if self.empty:
            return numerator.zero_(), query.new_zeros(query.shape[:2])
        readable = self._readable()
        torch.bmm(self.expansion.expanded(query).mT, readable, out=numerator)
        return numerator, self.expansion.mass(query, self.normalizer)

    def fold(self, key: Tensor, value: Tensor, factor: Tensor | None) -> None:
        """Add key (G, T, r) and value (G, T, h), each token times `factor` (G, T) where that is given."""
        scaled = key if factor is None else key * factor[..., None]
        self._add(key, value if factor is None else value * factor[..., None], scaled)

    def read_squares(self, query: Tensor) -> Tensor:
        """At power 2, query (G, R, r) -> what its squares alone give to the denominator, (G, R)."""
        squares = self.normalizer.diagonal(dim1=1, dim2=2)
        return torch.bmm(query.square(), squares[..., None])[..., 0]

    def add_squares(self, query: Tensor, by: Tensor, numerator: Tensor) -> Tensor:
        """At power 2, add what the squares give to the numerator (G, R, h), times `by` (G, R)."""
        squares = self.sums[:, self.expansion.squares]
        return numerator.baddbmm_(query.square() * by[..., None], squares)

    def read_backward(self, query: Tensor, numerator_gradient: Tensor, denominator_gradient: Tensor) -> Tensor:
        """The gradient of `read` with respect to the query, (G, R, r)."""
        if self.empty:
            return torch.zeros_like(query)
        readable = self._readable()
        through_mass = self.expansion.mass_gradient(query, self.normalizer) * denominator_gradient[..., None]
        return through_mass.add_(self.expansion.contracted(query, readable, numerator_gradient))

    def add_read_gradient(self, query: Tensor, numerator_gradient: Tensor, denominator_gradient: Tensor) -> None:
        """Of `self` as a gradient: add that of one `read`."""
        self._add(query, numerator_gradient, query * denominator_gradient[..., None])

    def fold_backward(self, key: Tensor, value: Tensor, factor: Tensor | None) -> Pair:
        """Of `self` as the gradient after a `fold`: the gradients of that fold's key (G, T, r) and value (G, T, h)."""
        if self.empty:
            return torch.zeros_like(key), torch.zeros_like(value)
        readable = self._readable()
        value_gradient = torch.bmm(self.expansion.expanded(key).mT, readable)
        key_gradient = self.expansion.contracted(key, readable, value)
        key_gradient = key_gradient + self.expansion.mass_gradient(key, self.normalizer)
        if factor is None:
            return key_gradient, value_gradient
        return key_gradient * factor[..., None], value_gradient * factor[..., None]

    def _readable(self) -> Tensor:
        """w * S, made once between two changes; the normalizer too is as it is to be read after this."""
        self._settle()
        if self.expansion.weights is None:
            return self.sums
        if self._weighted is None:
            memory = self.workspace.take("weighted sums", tuple(self.sums.shape), self.sums)
            self._weighted = torch.mul(self.sums, self.expansion.weights, out=memory)
        return self._weighted
