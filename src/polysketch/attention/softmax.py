"""Softmax attention: the baseline."""

import torch
from torch import Tensor

from polysketch import ops
from polysketch.attention.base import Mechanism
from polysketch.attention.key_value_state import KeyValueState


class SoftmaxAttention(Mechanism):
    """o_i = sum_j softmax_j(q_i . k_j / sqrt(head_dim)) v_j, by PyTorch's scaled_dot_product_attention.

    Vaswani et al., "Attention Is All You Need" (arXiv:1706.03762), section 3.2.1. Quadratic in the length; when
    decoding it keeps every key and value. Sizes as for `Mechanism`; no options.

    Cost: 2 (head_dim + value_dim) operations a token and head for each token it sees; the state is head_dim + value_dim
    numbers a token and key/value head.
    """

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
        return ops.softmax_attention(query, key, value, causal=causal, key_mask=key_mask)

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> KeyValueState:
        """An empty store of keys and values."""
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
        keys, values, mask = state.append(key, value, key_mask)
        output = ops.softmax_attention_with_cache(query.to(keys.dtype), keys, values, key_mask=mask)
        return output.to(value.dtype), state
