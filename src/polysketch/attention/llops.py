"""Attention over the learned low-rank polynomial sketch (LLOPS, equations 2 and 17)."""

from polysketch.attention.linearized import LinearizedAttention
from polysketch.feature_maps import LowRankSketch


class LlopsAttention(LinearizedAttention):
    """o_i = sum_j w_ij v_j, w_ij = phi_Q(q_i) . phi_K(k_j), with phi products of `degree` learned projections.

    By default there is no denominator, as in the paper (LLOPS, equations 2 and 17). Weights are of either sign, and
    their sum may be anything, zero too. Outputs beyond the range of a float16 value are infinite. `nonnegative` squares
    the features entrywise: weights are then never negative and may be normalised. `normalize` divides: o_i =
    sum_j w_ij v_j / (1 + sum_j w_ij); products of features then grow as entries to the power of 4 `degree`, and must
    stay within the 1e38 of float32. Queries and keys have no layer norm and no factor 1 / sqrt(head_dim).

    The paper does not say whether heads share the factors. Here each key/value head has its own (`LowRankSketch`).

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        degree: p, of the polynomial kernel; 2, 3, 4 and 6 in the paper. 2 p in all with `nonnegative`.
        num_features: m; time and state grow in proportion.
        rank: t, products summed to one feature; 1 in the paper's experiments.
        normalize: divide by 1 + the sum of weights; needs `nonnegative`.
        nonnegative: square the features.

    Raises:
        TypeError: an option of another type.
        ValueError: a size below one, or `normalize` with weights of either sign.

    Cost: a token and head, 2 rank degree head_dim num_features multiply-adds for the features of query and key, and
    about 2 num_features (value_dim + 1) for attention.
    """

    offset = 1.0

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        degree: int = 4,
        num_features: int = 256,
        rank: int = 1,
        normalize: bool = False,
        nonnegative: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        if not isinstance(normalize, bool):
            raise TypeError(f"normalize must be True or False, got {normalize!r}")
        self.feature_map = LowRankSketch(
            head_dim,
            degree=degree,
            num_features=num_features,
            rank=rank,
            nonnegative=nonnegative,
            num_kv_heads=self.num_kv_heads,
            share="head",
        )
        if normalize and not nonnegative:
            raise ValueError(
                "normalize=True divides by a sum of weights of either sign, which may be zero: add nonnegative=True, "
                "or leave out the denominator, as the paper does, with normalize=False"
            )
        self.normalize = normalize

    def extra_repr(self) -> str:
        """Sizes and options; the map beside it names its degree, rank and sign."""
        return f"{super().extra_repr()}, num_features={self.feature_map.feature_dim}, normalize={self.normalize}"
