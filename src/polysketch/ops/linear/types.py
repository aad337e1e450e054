"""Named arguments and results of `linear_attention`."""

from typing import NamedTuple

from torch import Tensor

from polysketch.ops.linear.state import LinearAttentionState


class LocalPolynomial(NamedTuple):
    """The exact part: tokens of the same aligned chunk weigh (query . key)^degree instead of the sketched weight.

    Attributes:
        query: (batch, heads, length, head_dim).
        key: (batch, key_heads, length, head_dim).
        degree: even, at least 2.
        chunk: tokens of a chunk; chunks are aligned to multiples of it, counted from each row's first real token.
    """

    query: Tensor
    key: Tensor
    degree: int = 4
    chunk: int = 1024


class LinearAttentionResult(NamedTuple):
    """What `linear_attention` returns.

    Attributes:
        output: (batch, heads, length, value_dim), dtype of the value.
        state: the state after the last token, or None where it was not asked for.
    """

    output: Tensor
    state: LinearAttentionState | None
