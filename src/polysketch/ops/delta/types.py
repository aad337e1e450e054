"""What travels through a call of `delta_writes`."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Tensors of a call, of one dtype.

    Attributes:
        key: (batch, heads, length, r), key features.
        value: (batch, heads, length, value_dim).
        strength: (batch, heads, length).
        sums: (batch, heads, expanded_size, value_dim), what was written before the first token; None for nothing.
    """

    key: Tensor
    value: Tensor
    strength: Tensor
    sums: Tensor | None = None
