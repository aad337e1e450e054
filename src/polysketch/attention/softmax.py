"""Softmax attention: the baseline."""

from torch import Tensor

from polysketch import ops
from polysketch.attention.kept_tokens import AllTokensAttention


class SoftmaxAttention(AllTokensAttention):
    """o_i = sum_j softmax_j(q_i . k_j / sqrt(head_dim)) v_j, by PyTorch's scaled_dot_product_attention.

    Vaswani et al., "Attention Is All You Need" (arXiv:1706.03762), section 3.2.1. Time is quadratic in the length.
    Decoding keeps every key and value. Where |q . k| / sqrt(head_dim) is above about 1e7, PyTorch's gradient may not be
    finite: it takes weights from a logarithm of their sum that is rounded to several units.

    Sizes are as for `Mechanism`; there are no options.

    Cost: 2 (head_dim + value_dim) operations a token and head for each token it sees; the state is head_dim + value_dim
    numbers a token and key/value head.
    """

    is_blockwise = True

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
        """PyTorch's attention, over a whole sequence."""
        return ops.softmax_attention(query, key, value, causal=causal, block_size=block_size, key_mask=key_mask)

    def attend_to_cache(
        self, query: Tensor, keys: Tensor, values: Tensor, *, key_mask: Tensor | None, block_size: int | None = None
    ) -> Tensor:
        """PyTorch's attention, from the last tokens."""
        return ops.softmax_attention_with_cache(query, keys, values, block_size=block_size, key_mask=key_mask)
