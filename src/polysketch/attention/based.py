"""BASED: linear attention whose weights are the exponential's Taylor polynomial on small projections."""

from polysketch.attention.linearized import LinearizedAttention
from polysketch.feature_maps import Taylor
from polysketch.ops.arguments import check_at_least_one


class BasedAttention(LinearizedAttention):
    """o_i = sum_j w_ij v_j / (1e-12 + sum_j w_ij), w_ij = 1 + s + s^2 / 2, s = (q_i W_q) . (k_j W_k) / sqrt(d).

    BASED (Arora et al., arXiv 2402.18668). W_q and W_k are learned, head_dim to d, one of each for every key/value
    head; queries and keys are not normed. The features are packed, 153 of them at d = 16, and the weights exact. Sums
    are float32 or better, in which the 1e-12 is there, though no weight is below 1/2. This is the linear part alone:
    the paper's models interleave it with sliding-window attention and short convolutions.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        feature_dim: d, the width of the projections; time and state grow as d^2.

    Raises:
        TypeError: a feature_dim that is not an integer.
        ValueError: a feature_dim below one.

    Cost: with m = 1 + d + d (d + 1) / 2, 4 m (value_dim + 1) operations a token and head; a state of m (value_dim + 1)
    numbers for each key/value head. Features and values are float32 inside, whatever the inputs: s^2 is a sum of d^2
    products of either sign, of which little is left where a long query and key are nearly orthogonal.
    """

    offset = 1e-12
    is_wide = True

    def __init__(
        self, num_heads: int, head_dim: int, num_kv_heads: int | None = None, *, feature_dim: int = 16
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_at_least_one(feature_dim=feature_dim)
        self.feature_map = Taylor(head_dim, projected_dim=feature_dim, num_kv_heads=self.num_kv_heads)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, feature_dim={self.feature_map.projected_dim}"
