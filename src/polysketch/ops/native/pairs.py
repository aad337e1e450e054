"""What the calls of exact attention over pairs begin with: `PairsCall` of seen_pairs.h, and how one is run."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from polysketch.ops.native.tensors import TensorPointer, in_float32, run_in_threads, run_program

QUERIES = 32
"""kQueries of product.h."""

# Fewer products than this are one thread's work: waking another costs more.
_PRODUCTS_WORTH_A_THREAD = 2**21

_SIZES = ("heads", "key_heads", "queries", "keys", "width", "value_width", "behind", "ahead", "block", "spans")

PAIRS_FIELDS: tuple[tuple[str, Any], ...] = (
    *((name, ctypes.c_int64) for name in _SIZES),
    ("scale", ctypes.c_float),
    *((name, TensorPointer) for name in ("query", "key", "value")),
    ("key_mask", ctypes.c_void_p),
    ("key_mask_row", ctypes.c_int64),
    ("key_rows", ctypes.c_void_p),
)
"""Of every call, before its own."""


class Pairs(NamedTuple):
    """Which pairs a call is about.

    Attributes:
        query: (batch, heads, n, head_dim).
        key: (batch, key_heads, m, head_dim); the query i stands at position m - n + i of the keys.
        value: (batch, key_heads, m, value_dim).
        key_mask: (batch, m) bool, or None.
        behind, ahead: keys before and after its own position that a query sees.
        block: tokens of a block beyond the end of which no query sees; 0 for none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    behind: int
    ahead: int
    block: int


class PairsArguments:
    """A call, and the tensors that its pointers look into.

    Args:
        structure: of the call; its fields begin with `PAIRS_FIELDS`.
        pairs: what it is about.
        scale: factor on q . k.
        num_spans: (key heads over the batch) -> spans of queries of each, if it is worth more than one thread.
    """

    def __init__(
        self, structure: type[ctypes.Structure], pairs: Pairs, scale: float, num_spans: Callable[[int], int]
    ) -> None:
        self._kept: list[Tensor] = []
        query, key, value, mask = pairs[:4]
        heads = query.shape[0] * key.shape[1]
        sizes = (query.shape[1], key.shape[1], query.shape[2], key.shape[2], key.shape[3], value.shape[3])
        seen = min(pairs.behind + pairs.ahead + 1, key.shape[2])
        products = query.shape[0] * query.shape[1] * query.shape[2] * seen * sum(sizes[4:])
        self._threaded = products >= _PRODUCTS_WORTH_A_THREAD
        spans = num_spans(heads) if self._threaded else 1
        self.units = heads * spans
        self.call = structure(*sizes, pairs.behind, pairs.ahead, pairs.block, spans, scale)
        self.rows(query=query, key=key, value=value)
        if mask is not None:
            mask = mask if mask.stride(1) == 1 or mask.shape[1] == 1 else mask.contiguous()
            self.point("key_mask", mask)
            self.call.key_mask_row = mask.stride(0)

    def point(self, name: str, tensor: Tensor | None) -> None:
        """An address; nothing for None."""
        if tensor is not None:
            self._kept.append(tensor)
            setattr(self.call, name, tensor.data_ptr())

    def rows(self, **tensors: Tensor) -> None:
        """Tensors (batch, heads, tokens) or (batch, heads, tokens, width), of any strides."""
        for name, tensor in tensors.items():
            rows = in_float32(tensor)
            rows = rows if rows.dim() == 3 or rows.stride(3) == 1 or rows.shape[3] == 1 else rows.contiguous()
            self._kept.append(rows)
            setattr(self.call, name, TensorPointer.of(rows))

    def run(self, program: Callable[..., int]) -> None:
        """Run the program on all units, dealt out to the threads."""
        if self._threaded:
            run_in_threads(program, self.call, self.units, self._kept)
        else:
            run_program(program, self.call, range(self.units))
