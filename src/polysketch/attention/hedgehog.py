"""Hedgehog: linear attention over learned softmax features."""

from polysketch.attention.linearized import LinearizedAttention
from polysketch.feature_maps import Hedgehog


class HedgehogAttention(LinearizedAttention):
    """o_i = sum_j w_ij v_j / sum_j w_ij, w_ij = phi_q(q_i) . phi_k(k_j), phi(x) = [softmax(x W), softmax(-x W)].

    Hedgehog (Zhang et al., arXiv 2402.04347). W is learned, separate for queries and keys, one of each for every
    key/value head, and starts at the identity. A weight is between 0 and 2. Where all weights of a row underflow, its
    output is zero.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        num_features: width of phi, even; 2 head_dim when None, or more (PolySketchFormer compares with 1024).

    Raises:
        TypeError: a num_features that is not an integer.
        ValueError: a num_features that is odd or below 2 head_dim.

    Cost: 4 num_features (value_dim + 1) operations a token and head; a state of num_features (value_dim + 1) numbers
    for each key/value head.
    """

    def __init__(
        self, num_heads: int, head_dim: int, num_kv_heads: int | None = None, *, num_features: int | None = None
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        self.feature_map = Hedgehog(head_dim, num_features=num_features, num_kv_heads=self.num_kv_heads)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, num_features={self.feature_map.feature_dim}"
