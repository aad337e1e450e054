"""Exact polynomial attention inside aligned chunks: polysketch without its sketched prefix."""

import torch
from torch import Tensor, nn

from polysketch import ops
from polysketch.attention.base import Mechanism, check_even_degree, check_positive_int
from polysketch.attention.recent_tokens import RecentTokens

_NORM_EPSILON = 1e-5
_OFFSET = 1.0


class LocalAttention(Mechanism):
    """o_i = sum_j w_ij v_j / (1 + sum_j w_ij), w_ij = <LN(q_i), LN(k_j)>^degree where i and j share an aligned chunk.

    The local part of polysketch attention (PolySketchFormer, section 3.2) alone: what the sketched prefix adds is
    measured against it. Nothing crosses a chunk boundary, in any layer. Layer norms as in `PolynomialAttention`.
    Linear in the length; when decoding it keeps the keys and values of one chunk.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        degree: even, 4 in most of the paper.
        local_chunk: tokens of a chunk.

    Raises:
        ValueError: an odd degree.

    Cost: (head_dim + value_dim) local_chunk operations a token and head, half a chunk being seen on average; the state
    is local_chunk (head_dim + value_dim) numbers a key/value head.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        degree: int = 4,
        local_chunk: int = 1024,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_even_degree(degree)
        check_positive_int("local_chunk", local_chunk)
        self.degree, self.local_chunk = degree, local_chunk
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
        """As `Mechanism.forward`; `hidden` is ignored. Without `causal`, all tokens of a chunk see one another."""
        self.check_inputs(query, key, value)
        query, key = self.query_norm(query).to(value.dtype), self.key_norm(key).to(value.dtype)
        return self._attend(query, key, value, causal=causal, key_mask=key_mask)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> RecentTokens:
        """Room for the normalised keys and the values of one chunk."""
        return RecentTokens(batch_size, self.local_chunk, device, dtype)

    @torch.no_grad()
    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: RecentTokens,
        *,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, RecentTokens]:
        """As `Mechanism.extend`; a new token costs one product with the keys and values of its chunk so far."""
        self.check_inputs(query, key, value)
        query, key = self.query_norm(query).to(value.dtype), self.key_norm(key).to(value.dtype)
        if query.shape[2] == 1:
            state.append(key, value, key_mask)
            return self._attend_to_open_chunk(query, state, key, value), state
        kept_key, kept_value, _ = state.slots(key, value)
        output = self._attend(
            query.to(kept_key.dtype),
            key.to(kept_key.dtype),
            value.to(kept_value.dtype),
            causal=True,
            key_mask=key_mask,
            opened=ops.OpenChunk(kept_key, kept_value, state.position) if bool(state.position.any()) else None,
        )
        state.append(key, value, key_mask)
        return output.to(value.dtype), state

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
        options = {"degree": self.degree, "chunk": self.local_chunk, "offset": _OFFSET, **options}
        return ops.local_attention(query, key, value, **options)

    def _attend_to_open_chunk(self, query: Tensor, state: RecentTokens, key: Tensor, value: Tensor) -> Tensor:
        """One query a row over its chunk so far: the slots up to the token's own, for chunks start at slot 0."""
        last = (state.position - 1) % self.local_chunk
        filled = int(last.max()) + 1
        keys, values, _ = state.slots(key, value)
        in_chunk = None  # masked tokens are keys of zeros, without weight: only rows that are not as far need a mask
        if bool((last < filled - 1).any()):
            in_chunk = (torch.arange(filled) <= last[:, None]).to(keys.device)
        output = ops.polynomial_attention(
            query.to(keys.dtype),
            keys[:, :, :filled],
            values[:, :, :filled],
            degree=self.degree,
            offset=_OFFSET,
            key_mask=in_chunk,
        )
        return output.to(value.dtype)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, degree={self.degree}, local_chunk={self.local_chunk}"
