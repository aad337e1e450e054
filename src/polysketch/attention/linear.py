"""Linear attention: weights that are products of elementwise features."""

from typing import Literal

from polysketch.attention.linearized import LinearizedAttention
from polysketch.feature_maps import Elementwise


class LinearAttention(LinearizedAttention):
    """o_i = sum_j w_ij v_j / sum_j w_ij, w_ij = f(q_i) . f(k_j), f = elu + 1, relu or squared relu entry by entry.

    Katharopoulos, Vyas, Pappas and Fleuret, "Transformers are RNNs" (ICML 2020), section 3.2: elu + 1. With the two
    others a query that has weight zero on every key gets zeros. No 1/sqrt(head_dim), as there. Sums of weights must
    stay within the 1e38 of float32: with squared relu, entries of queries and keys up to about 1e8.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        kind: "elu" (elu + 1), "relu" or "squared-relu".

    Raises:
        ValueError: an unknown kind, or sizes that do not fit.

    Cost: about 4 head_dim (value_dim + 1) operations a token and head for the sums; the state is head_dim
    (value_dim + 1) numbers per key/value head.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        kind: Literal["elu", "relu", "squared-relu"] = "elu",
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        self.feature_map = Elementwise(head_dim, kind=kind, num_kv_heads=self.num_kv_heads)
