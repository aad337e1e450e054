"""Softmax attention to the last tokens: a baseline of linear-time attention."""

import torch
from torch import Tensor

from polysketch import ops
from polysketch.attention.base import Mechanism, check_positive_int
from polysketch.attention.recent_tokens import RecentTokens


class SlidingWindowAttention(Mechanism):
    """o_i = sum_j softmax_j(q_i . k_j / sqrt(head_dim)) v_j over the last `window` tokens, j = i - window + 1 .. i.

    A token thus depends on the last layers * (window - 1) tokens of a model, and on nothing before. Linear in the
    length; when decoding it keeps the keys and values of `window` tokens. Without `causal`, |i - j| < window.
    A baseline of the papers (Based, arXiv:2402.18668; there too beside linear attention).

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        window: tokens that a token sees, itself included.

    Cost: 2 (head_dim + value_dim) window operations a token and head; the state is window (head_dim + value_dim)
    numbers a key/value head.
    """

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int | None = None, *, window: int = 1024) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_positive_int("window", window)
        self.window = window

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
        return ops.sliding_window_attention(query, key, value, window=self.window, causal=causal, key_mask=key_mask)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> RecentTokens:
        """A ring of `window` keys and values."""
        return RecentTokens(batch_size, self.window, device, dtype)

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
        """As `Mechanism.extend`; a new token costs one product with `window` keys and values."""
        self.check_inputs(query, key, value)
        dtype = state.slots(key, value)[0].dtype
        if query.shape[2] == 1:  # the ring in any order: softmax does not ask for one
            state.append(key, value, key_mask)
            keys, values, real = state.slots(key, value)
            output = ops.softmax_attention(query.to(dtype), keys, values, key_mask=real)
        else:
            keys, values, mask = state.followed_by(key, value, key_mask)
            output = ops.sliding_window_attention_with_cache(
                query.to(dtype), keys, values, window=self.window, key_mask=mask
            )
            state.append(key, value, key_mask)
        return output.to(value.dtype), state

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, window={self.window}"
