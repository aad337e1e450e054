"""FAVOR+: positive orthogonal random features (Choromanski and others, "Rethinking Attention with Performers")."""

from typing import Literal

import torch
from torch import Tensor

from polysketch.feature_maps.base import FeatureMap
from polysketch.feature_maps.draws import begin_draw, seed_or_default
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.autocast import without_autocast
from polysketch.ops.random_features import random_features
from polysketch.ops.random_features.reference import KINDS, LARGEST_EXPONENT, projections

# With more, 1e-6 exp(-c) and the features of typical keys would be below the smallest float32, exp(-87).
_LARGEST_CONSTANT = 60.0


class PerformerFeatures(FeatureMap):
    """Random features whose products estimate a kernel of query and key, never negative.

        x' = x head_dim^(-1/4),    u = W x',    m = num_features
        "softmax":  phi(x) = m^(-1/2) (exp(u - |x'|^2 / 2 - c) + 1e-6)        estimates exp(q . k / sqrt(head_dim))
        "relu":     phi(x) = m^(-1/2) (relu(u) + 1e-3)                        estimates E relu(w . q') relu(w . k')

    Rows w of W are Gaussian of unit variance. Where `orthogonal`, head_dim of them at a time have orthogonal directions
    (Haar, by a QR whose signs are restored) and independent norms of Gaussian vectors: each row is Gaussian still, the
    estimate unbiased still, its variance smaller. One W for queries, keys and all heads.

    The constant c keeps exp in range. A query's c is its own largest exponent; it cancels when weights are normalised.
    All keys share one c, max(0, max |w|^2 / 2 - 40). It depends on W alone, for an exponent never exceeds |w|^2 / 2.
    The keys' 1e-6 is scaled by exp(-c), so that c cancels exactly. Published code subtracts the largest exponent over
    all keys, later ones too; with its 1e-6 causal attention then sees the future. In heads wider than about 140,
    |w|^2 / 2 spans more than float32 does. There c stops at 60, and an exponent beyond 100 counts as 100: that of a key
    far longer than usual and aligned with a row.

    W and the seed of the next draw are buffers, saved with the model: a reloaded map computes the same and is redrawn
    alike. Only construction and `resample` draw.

    Args:
        head_dim: width of one head.
        num_features: m, rows of W.
        kind: "softmax" or "relu".
        orthogonal: orthogonal rows, else independent ones.
        seed: of the first draw and all after it, from 0 on; None takes one from PyTorch's default generator. Layers
            built with the same seed have the same W.
        num_kv_heads: accepted so that every map is built alike.

    Raises:
        TypeError: sizes or a seed that are not integers.
        ValueError: a size below one, an unknown kind, or a seed below 0.

    Cost: head_dim m multiply-adds a token and head; features are float32 (float64 for float64 inputs), under autocast
    too.
    """

    power = 1
    weight: Tensor
    key_constant: Tensor
    next_seed: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        num_features: int = 256,
        kind: Literal["softmax", "relu"] = "softmax",
        orthogonal: bool = True,
        seed: int | None = None,
        num_kv_heads: int = 1,
    ) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads)
        check_at_least_one(num_features=num_features)
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r}; known kinds: {', '.join(KINDS)}")
        self.kind = kind
        self.orthogonal = orthogonal
        self.feature_dim = num_features
        self.register_buffer("weight", torch.empty(num_features, head_dim))
        self.register_buffer("key_constant", torch.empty(()))
        self.register_buffer("next_seed", torch.empty((), dtype=torch.int64))
        self._draw(begin_draw(seed_or_default(seed), self.next_seed))

    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw W anew: from `generator`, or, without one, the next draw of the map's own seed.

        Called every so many steps without a generator it is a schedule: the k-th draw depends on the seed and k alone,
        and continues after a reload. A decoding state of before has sums of other features: start a new one.
        """
        self._draw(begin_draw(int(self.next_seed), self.next_seed) if generator is None else generator)

    def map_queries(self, x: Tensor) -> Tensor:
        """phi with each query's own constant."""
        return self._map(x, None)

    def map_keys(self, x: Tensor) -> Tensor:
        """phi with the constant of all keys."""
        return self._map(x, self.key_constant)

    def log_scale(self, query: Tensor) -> Tensor:
        """What the constants of a query and of keys take from the exponents of their products, kind "softmax" alone.

        phi(q) . phi(k) exp(log_scale(q)) estimates exp(q . k / sqrt(head_dim)) itself: on one scale for all queries.

        Args:
            query: (batch, heads, length, head_dim).

        Returns:
            (batch, heads, length), float32 or float64.

        Raises:
            ValueError: another kind, whose features have no constants.
        """
        if self.kind != "softmax":
            raise ValueError(f"log_scale needs kind='softmax': features of kind {self.kind!r} have no constants")
        self.check_input(query)
        projected, scaled = projections(query, self.weight)
        with without_autocast(query.device.type):
            return projected.amax(-1) - scaled.square().sum(-1) / 2 + self.key_constant.to(projected.dtype)

    def extra_repr(self) -> str:
        """Sizes and kind."""
        return f"{super().extra_repr()}, kind={self.kind!r}, orthogonal={self.orthogonal}"

    def _map(self, x: Tensor, constant: Tensor | None) -> Tensor:
        self.check_input(x)
        return random_features(x, self.weight, constant, kind=self.kind)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator) -> None:
        draw = orthogonal_rows if self.orthogonal else gaussian_rows
        weight = draw(self.feature_dim, self.head_dim, generator)
        self.weight.copy_(weight)
        self.key_constant.copy_((weight.square().sum(-1).max() / 2 - LARGEST_EXPONENT).clamp(0, _LARGEST_CONSTANT))


def gaussian_rows(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """(rows, width) float64, independent Gaussian entries of unit variance, on the generator's device."""
    return torch.randn(rows, width, generator=generator, device=generator.device, dtype=torch.float64)


def orthogonal_rows(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """(rows, width) float64: each row Gaussian of unit variance, the rows of each block of `width` orthogonal.

    The sign of R's diagonal goes to Q, without which Q is not uniform (Haar); the norms are those of other Gaussian
    rows (chi with `width` degrees of freedom), for sqrt(width) is biased low.
    """
    blocks = -(-rows // width)
    orthogonal, triangle = torch.linalg.qr(gaussian_rows(blocks * width, width, generator).unflatten(0, (-1, width)))
    orthogonal = orthogonal * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    norms = gaussian_rows(rows, width, generator).norm(dim=-1, keepdim=True)
    return orthogonal.mT.flatten(0, 1)[:rows] * norms
