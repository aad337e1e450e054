"""Softmax attention to the last tokens: a baseline of linear-time attention."""

from torch import Tensor

from polysketch import ops
from polysketch.attention.kept_tokens import RecentTokensAttention
from polysketch.attention.recent_tokens import RecentTokens
from polysketch.attention.span_state import SpanState
from polysketch.ops.arguments import check_at_least_one


class SlidingWindowAttention(RecentTokensAttention):
    """o_i = sum_j softmax_j(q_i . k_j / sqrt(head_dim)) v_j over the last `window` tokens, j = i - window + 1 .. i.

    In a model a token depends on the last layers * (window - 1) tokens, and on nothing before them. Without `causal`,
    |i - j| < window. Time is linear in the length. Decoding keeps the keys and values of `window` tokens. It is a
    baseline of the papers, and stands beside linear attention in BASED (arXiv:2402.18668).

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        window: tokens that a token sees, itself included.

    Cost: 2 (head_dim + value_dim) window operations a token and head; the state is window (head_dim + value_dim)
    numbers a key/value head.
    """

    is_blockwise = True

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int | None = None, *, window: int = 1024) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_at_least_one(window=window)
        self.window = window

    @property
    def reach(self) -> int:
        """The window."""
        return self.window

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
        """Softmax attention within the window, over a whole sequence."""
        return ops.sliding_window_attention(
            query, key, value, window=self.window, causal=causal, block_size=block_size, key_mask=key_mask
        )

    def attend_to_kept(self, query: Tensor, key: Tensor, value: Tensor, state: RecentTokens) -> Tensor:
        """One query a row over the ring in any order: softmax does not ask for one."""
        keys, values, real = state.slots(key, value)
        return ops.softmax_attention(query.to(keys.dtype), keys, values, key_mask=real)

    def attend_after_kept(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: RecentTokens,
        key_mask: Tensor | None,
        block_size: int | None = None,
    ) -> Tensor:
        """Several queries a row, over what is kept and themselves."""
        keys, values, mask = state.followed_by(key, value, key_mask)
        query = query.to(keys.dtype)
        return ops.sliding_window_attention_with_cache(
            query, keys, values, window=self.window, block_size=block_size, key_mask=mask
        )

    def attend_behind(self, query: Tensor, keys: Tensor, values: Tensor, state: SpanState) -> Tensor:
        """Over what is kept and themselves."""
        return state.window_attention(query, keys, values, window=self.window)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, window={self.window}"
