"""Exact polynomial attention (PolySketchFormer, section 2.1)."""

from torch import Tensor

from polysketch import ops
from polysketch.attention.base import check_even_degree, head_norm
from polysketch.attention.kept_tokens import AllTokensAttention

_OFFSET = 1.0  # added to the sum of weights: a row that sees only zero weights stays finite


class PolynomialAttention(AllTokensAttention):
    """o_i = sum_j w_ij v_j / (1 + sum_j w_ij), w_ij = <LN(q_i), LN(k_j)>^degree, without a factor 1/sqrt(head_dim).

    PolySketchFormer, section 2.1. There are two layer norms, one for queries and one for keys. Each has a learned scale
    and bias, shared by the heads. Departure: the paper's formula has one rescaling for both. In this library's models
    the norms come after the rotary positions, so that a weight depends on both positions, not on their distance alone.

    Weights and sums are float32 or better. Time is quadratic in the length. Decoding keeps every key and value.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        degree: even, 4 in most of the paper.

    Raises:
        ValueError: an odd degree.

    Cost: 2 (head_dim + value_dim) operations a token and head for each token it sees; the state is head_dim + value_dim
    numbers a token and key/value head.
    """

    is_blockwise = True

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int | None = None, *, degree: int = 4) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_even_degree(degree)
        self.degree = degree
        self.query_norm, self.key_norm = head_norm(head_dim), head_norm(head_dim)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None,
        block_size: int | None = None,
    ) -> Tensor:
        """The formula over a whole sequence, of normed queries and keys."""
        return ops.polynomial_attention(
            query,
            key,
            value,
            degree=self.degree,
            offset=_OFFSET,
            causal=causal,
            block_size=block_size,
            key_mask=key_mask,
        )

    def attend_to_cache(
        self, query: Tensor, keys: Tensor, values: Tensor, *, key_mask: Tensor | None, block_size: int | None = None
    ) -> Tensor:
        """The formula from the last tokens, of normed queries and keys."""
        return ops.polynomial_attention_with_cache(
            query, keys, values, degree=self.degree, offset=_OFFSET, block_size=block_size, key_mask=key_mask
        )

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, degree={self.degree}"
