"""The learned low-rank polynomial sketch (LLOPS, section 3.2)."""

import torch
from torch import Tensor, nn

from polysketch.feature_maps.base import FeatureMap
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.low_rank_sketch import low_rank_sketch


class LowRankSketch(FeatureMap):
    """Products of learned projections, in place of the head_dim^degree monomials that <q, k>^degree is made of.

        phi_Q(x) = sum_{t <= rank} prod_{j <= degree} x Theta_{t,j}^Q,    phi_K with factors of its own

    entrywise, every Theta (head_dim, num_features): each feature is a linear map of the degree-fold outer product of
    x, of rank `rank` (definition 3.3 has rank 1). phi_Q(q) . phi_K(k) may have either sign; `nonnegative` squares the
    features entrywise (end of section 3.2), and with them the degree: 2 degree in all.

    The paper leaves the start open. Here queries and keys start from the same Gaussian factors, scaled so that
    phi(q) . phi(k) is an unbiased random sketch of (q . k / head_dim)^degree; when `nonnegative`, a typical weight is
    about 1. Equal factors and a rank are special cases: elementwise powers, the quadratic term of BASED, a random
    sketch of degree 2.

    Args:
        head_dim: width of one head.
        degree: p, of the polynomial kernel; 2, 3, 4 and 6 in the paper.
        num_features: m.
        rank: t, the number of products that are summed.
        nonnegative: square the features.
        num_kv_heads: key and value heads.
        share: "layer", one map for all heads, or "head", as in the paper: factors for every key/value head.

    Raises:
        TypeError: a size that is no integer, or `nonnegative` no truth value.
        ValueError: a size below one.

    Cost: rank degree head_dim num_features multiply-adds a token and head; as many parameters for queries and for keys.
    """

    power = 1

    def __init__(
        self,
        head_dim: int,
        *,
        degree: int = 4,
        num_features: int = 256,
        rank: int = 1,
        nonnegative: bool = False,
        num_kv_heads: int = 1,
        share: str = "layer",
    ) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share=share)
        check_at_least_one(degree=degree, num_features=num_features, rank=rank)
        if not isinstance(nonnegative, bool):
            raise TypeError(f"nonnegative must be True or False, got {nonnegative!r}")
        self.degree, self.feature_dim, self.nonnegative = degree, num_features, nonnegative
        shape = (self.num_maps, rank, degree, head_dim, num_features)
        self.query_factors = nn.Parameter(torch.empty(shape))
        self.key_factors = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw factors from PyTorch's default generator, the same for queries and keys."""
        rank, squares = self.query_factors.shape[1], 2 if self.nonnegative else 1
        product_variance = self.feature_dim ** (-1 / squares) / rank  # of a product of all factors with a unit normal
        self.query_factors.normal_(std=self.head_dim**-0.5 * product_variance ** (0.5 / self.degree))
        self.key_factors.copy_(self.query_factors)

    def map_queries(self, x: Tensor) -> Tensor:
        """phi_Q."""
        return self._map(x, self.query_factors)

    def map_keys(self, x: Tensor) -> Tensor:
        """phi_K."""
        return self._map(x, self.key_factors)

    def _map(self, x: Tensor, factors: Tensor) -> Tensor:
        self.check_input(x)
        x = x.float() if x.dtype == torch.float16 else x  # products leave the range of float16
        features = low_rank_sketch(x, factors.to(x.dtype))
        return features.square() if self.nonnegative else features

    def extra_repr(self) -> str:
        """Sizes and options."""
        rank = self.query_factors.shape[1]
        return f"{super().extra_repr()}, degree={self.degree}, rank={rank}, nonnegative={self.nonnegative}"
