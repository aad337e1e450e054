"""What travels through a call of `delta_memory`."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Tensors of a call; all but the cells of one dtype.

    Attributes:
        query_cells: (batch, heads, length, 2 k) int32, cells of two sparse vectors, those of the first in front.
        query_weights: (batch, heads, length, 2 k), the weights there.
        key_cells, key_weights: the same of keys, (batch, key_heads, length, 2 k).
        value: (batch, key_heads, length, value_dim).
        strength: (batch, key_heads, length).
    """

    query_cells: Tensor
    query_weights: Tensor
    key_cells: Tensor
    key_weights: Tensor
    value: Tensor
    strength: Tensor
