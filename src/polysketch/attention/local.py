"""Exact polynomial attention inside aligned chunks: polysketch without its sketched prefix."""

import torch
from torch import Tensor

from polysketch import ops
from polysketch.attention.base import check_even_degree, head_norm
from polysketch.attention.kept_tokens import RecentTokensAttention
from polysketch.attention.recent_tokens import RecentTokens
from polysketch.attention.span_state import SpanState
from polysketch.ops.arguments import check_at_least_one

_OFFSET = 1.0


class LocalAttention(RecentTokensAttention):
    """o_i = sum_j w_ij v_j / (1 + sum_j w_ij), w_ij = <LN(q_i), LN(k_j)>^degree where i and j share an aligned chunk.

    This is the local part of polysketch attention (PolySketchFormer, section 3.2) alone. What the sketched prefix adds
    is measured against it. Nothing crosses a chunk boundary, in any layer. Layer norms are as in `PolynomialAttention`.
    Time is linear in the length. Decoding keeps the keys and values of one chunk.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        degree: even, 4 in most of the paper.
        local_chunk: tokens of a chunk.

    Raises:
        ValueError: an odd degree.

    Cost: (head_dim + value_dim) local_chunk operations a token and head, half a chunk being seen on average; the state
    is local_chunk (head_dim + value_dim) numbers a key/value head.
    """

    is_blockwise = True

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
        check_at_least_one(local_chunk=local_chunk)
        self.degree, self.local_chunk = degree, local_chunk
        self.query_norm, self.key_norm = head_norm(head_dim), head_norm(head_dim)

    @property
    def reach(self) -> int:
        """One chunk."""
        return self.local_chunk

    def why_not_blocks(self, block_size: int) -> str | None:
        """As `Mechanism.why_not_blocks`: blocks and chunks must not cut one another."""
        if block_size % self.local_chunk == 0 or self.local_chunk % block_size == 0:
            return None
        return f"block_size must divide local_chunk or be a multiple of it, got {block_size} and {self.local_chunk}"

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None,
        block_size: int | None = None,
        opened: ops.OpenChunk | None = None,
    ) -> Tensor:
        """The formula, of normed queries and keys; without `causal`, all tokens of a chunk see one another."""
        return ops.local_attention(
            query,
            key,
            value,
            degree=self.degree,
            chunk=self.local_chunk,
            offset=_OFFSET,
            causal=causal,
            block_size=block_size,
            key_mask=key_mask,
            opened=opened,
        )

    def attend_to_kept(self, query: Tensor, key: Tensor, value: Tensor, state: RecentTokens) -> Tensor:
        """One query a row over its chunk so far: the slots up to the token's own, for chunks start at slot 0."""
        last = (state.position - 1) % self.local_chunk
        filled = int(last.max()) + 1
        keys, values, _ = state.slots(key, value)
        in_chunk = None  # masked tokens are keys of zeros, without weight: only rows that are not as far need a mask
        if bool((last < filled - 1).any()):
            in_chunk = (torch.arange(filled, device="cpu") <= last[:, None]).to(keys.device)
        keys, values = keys[:, :, :filled], values[:, :, :filled]
        return ops.polynomial_attention(
            query.to(keys.dtype), keys, values, degree=self.degree, offset=_OFFSET, key_mask=in_chunk
        )

    def attend_after_kept(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: RecentTokens,
        key_mask: Tensor | None,
        block_size: int | None = None,
    ) -> Tensor:
        """Several queries a row: over the open chunk, if there is one, and their own chunks."""
        keys, values, _ = state.slots(key, value)
        opened = ops.OpenChunk(keys, values, state.position) if bool(state.position.any()) else None
        query, key, value = query.to(keys.dtype), key.to(keys.dtype), value.to(values.dtype)
        return self.attend(query, key, value, causal=True, block_size=block_size, key_mask=key_mask, opened=opened)

    def attend_behind(self, query: Tensor, keys: Tensor, values: Tensor, state: SpanState) -> Tensor:
        """Over the tokens of their chunks."""
        chunk, degree = self.local_chunk, self.degree
        return state.chunk_attention(query, keys, values, chunk=chunk, degree=degree, offset=_OFFSET)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, degree={self.degree}, local_chunk={self.local_chunk}"
