"""Exact polynomial attention (PolySketchFormer, section 2.1)."""

import torch
from torch import Tensor, nn

from polysketch import ops
from polysketch.attention.base import Mechanism, check_even_degree
from polysketch.attention.key_value_state import KeyValueState

_NORM_EPSILON = 1e-5
_OFFSET = 1.0  # added to the sum of weights: a row that sees only zero weights stays finite


class PolynomialAttention(Mechanism):
    """o_i = sum_j w_ij v_j / (1 + sum_j w_ij), w_ij = <LN(q_i), LN(k_j)>^degree, without a factor 1/sqrt(head_dim).

    PolySketchFormer, section 2.1. The two layer norms (one for queries, one for keys, shared by the heads) have a
    learned scale and bias. Weights and sums are float32 or better. Quadratic in the length; when decoding it keeps
    every key and value.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        degree: even, 4 in most of the paper.

    Raises:
        ValueError: an odd degree.

    Cost: 2 (head_dim + value_dim) operations a token and head for each token it sees; the state is head_dim + value_dim
    numbers a token and key/value head.
    """

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int | None = None, *, degree: int = 4) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_even_degree(degree)
        self.degree = degree
        self.query_norm = nn.LayerNorm(head_dim, eps=_NORM_EPSILON)
        self.key_norm = nn.LayerNorm(head_dim, eps=_NORM_EPSILON)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = True,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """As `Mechanism.forward`; `hidden` is ignored."""
        self.check_inputs(query, key, value)
        query, key = self.query_norm(query).to(value.dtype), self.key_norm(key).to(value.dtype)
        return ops.polynomial_attention(
            query, key, value, degree=self.degree, offset=_OFFSET, causal=causal, key_mask=key_mask
        )

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> KeyValueState:
        """An empty store of normalised keys and of values."""
        return KeyValueState(batch_size, device, dtype)

    @torch.no_grad()
    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: KeyValueState,
        *,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, KeyValueState]:
        """As `Mechanism.extend`; a new token costs one product with every stored key and value."""
        self.check_inputs(query, key, value)
        keys, values, mask = state.append(self.key_norm(key).to(value.dtype), value, key_mask)
        output = ops.polynomial_attention_with_cache(
            self.query_norm(query).to(keys.dtype), keys, values, degree=self.degree, offset=_OFFSET, key_mask=mask
        )
        return output.to(value.dtype), state

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, degree={self.degree}"
