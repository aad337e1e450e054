"""What a call consists of: the public key beside a window, and records that backends receive."""

from typing import NamedTuple

from torch import Tensor


class BesideKey(NamedTuple):
    """One more key for every query, beside those of its window, with a logit and a value of its own.

    Attributes:
        logit: (batch, heads, length), as it stands in the softmax; -inf for none.
        value: (batch, heads, length, value_dim).
    """

    logit: Tensor
    value: Tensor


class Inputs(NamedTuple):
    """The tensors of one call, checked; see `polysketch.ops.sliding_window_attention`.

    Attributes:
        query: (batch, heads, n, head_dim); query i stands at position m - n + i of the keys.
        key: (batch, key_heads, m, head_dim).
        value: (batch, key_heads, m, value_dim).
        key_mask: (batch, m) bool, or None.
        beside_logit, beside_value: of the key beside, both or neither.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None = None
    beside_logit: Tensor | None = None
    beside_value: Tensor | None = None


class Plan(NamedTuple):
    """The options of one call.

    Attributes:
        behind: keys before its own position that a query sees, less than there are keys.
        ahead: keys after it.
        scale: factor on q . k.
    """

    behind: int
    ahead: int
    scale: float
