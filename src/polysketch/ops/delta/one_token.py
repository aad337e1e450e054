"""Decoding with a window and the delta rule: one token of every row as one program, on a CPU.

What `attention.PolysketchAttention.extend` does in more than a hundred operations of PyTorch, each of which takes
longer to begin than to do, `ops/native/source/polysketch_one.cpp` does in one call.
"""

import ctypes
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.linear import LinearAttentionState, StateRows
from polysketch.ops.linear.native import SUM_KINDS, SUMS_WORTH_A_THREAD
from polysketch.ops.native import TensorPointer, library, run_in_threads, run_program
from polysketch.ops.native import why_not as why_no_program


class Token(NamedTuple):
    """One token of every row.

    Attributes:
        query: (batch, heads, 1, head_dim).
        key: (batch, key_heads, 1, head_dim).
        value: (batch, key_heads, 1, value_dim).
        sketched_query, sketched_key: what sketches are taken of, of the same heads and any one width.
        hidden: (batch, 1, hidden_size), the layer's input.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sketched_query: Tensor
    sketched_key: Tensor
    hidden: Tensor


class Weights(NamedTuple):
    """Parameters of the mechanism.

    Attributes:
        sketches: (key_heads, sketched width, 2 sketch_size).
        strength, strength_bias: (key_heads, hidden_size) and (key_heads,), for the logit of the strength of writing;
            the first None where hidden says nothing.
        far, far_bias: the same for the logit of the key beside the window.
        confidence_scale, log_scale: (key_heads,).
    """

    sketches: Tensor
    strength: Tensor | None
    strength_bias: Tensor
    far: Tensor | None
    far_bias: Tensor
    confidence_scale: Tensor
    log_scale: Tensor


class Ring(NamedTuple):
    """The last tokens of every row, a token in the slot of its position modulo the window.

    Attributes:
        key: (rows, key_heads, window, head_dim + 2 sketch_size + 1): keys, their sketches, and strengths of writing.
        value: (rows, key_heads, window, value_dim), in the dtype of the keys, float32 or half precision.
        real: (rows, window) bool, whether a slot holds a real token.
        position: (batch,) int64 in host memory, tokens before this one.
        rows: (batch,) int64, the row of each row of the batch; None for its own.
    """

    key: Tensor
    value: Tensor
    real: Tensor
    position: Tensor
    rows: Tensor | None


_SIZES = ("heads", "key_heads", "width", "sketched_width", "sketch_size", "value_width", "window", "hidden_size")
_ROWS = ("query", "key", "value", "sketched_query", "sketched_key", "hidden", "output")
_SUMS = ("sums", "normalizer", "log_decay")


class _Call(ctypes.Structure):
    """`PolysketchOneCall` of polysketch_one.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (*_SIZES, "normed", "removed", "kind", "ring_kind")),
        *((name, TensorPointer) for name in _ROWS),
        *((name, ctypes.c_void_p) for name in Weights._fields),
        *((name, TensorPointer) for name in ("ring_key", "ring_value")),
        ("real", ctypes.c_void_p),
        ("real_row", ctypes.c_int64),
        *((f"state_{name}", TensorPointer) for name in _SUMS),
        *((name, ctypes.c_void_p) for name in ("position", "ring_rows", "sums_rows")),
    )


def takes(token: Token, weights: Weights, ring: Ring, sums: LinearAttentionState | StateRows) -> bool:
    """Whether the program can take this: float32 on a CPU with a compiler, and nobody traces; a state in half too."""
    if torch.compiler.is_compiling() or token.query.device.type != "cpu":
        return False
    given = (tensor for tensor in chain(token, weights) if tensor is not None)
    if any(tensor.dtype != torch.float32 for tensor in given):
        return False
    if ring.key.dtype != ring.value.dtype or not {ring.key.dtype, sums.pool.sums.dtype} <= set(SUM_KINDS):
        return False
    kept = (*ring[:2], *(getattr(sums.pool, name) for name in _SUMS))
    whole = all(tensor[0, 0].is_contiguous() for tensor in kept if 0 not in tensor.shape)
    return whole and ring.real.stride(1) == 1 and why_no_program(token.query) is None


def extend_one_(
    token: Token,
    weights: Weights,
    ring: Ring,
    sums: LinearAttentionState | StateRows,
    *,
    normed: bool,
    removed: bool,
) -> Tensor:
    """The output of the token; it takes the place of the oldest one in the ring, which is written into the sums.

    Args:
        token, weights, ring: tensors that `takes` agrees to. Whoever owns the ring moves its position on.
        sums: of the tokens that left the ring, of power 1 and two factors; they move on, their position too.
        normed: whether queries and keys get a root mean square of one.
        removed: whether nothing stands beside the window.

    Returns:
        (batch, heads, 1, value_dim), in float32. Nothing is differentiated.
    """
    (batch, heads, _, width), key_heads = token.query.shape, token.key.shape[1]
    sketched_width, size = token.sketched_key.shape[3], weights.sketches.shape[2] // 2
    output = token.value.new_empty(batch, heads, 1, token.value.shape[3])
    hidden = token.hidden[:, None]
    rows = [_innermost_contiguous(tensor) for tensor in (*token[:5], hidden, output)]
    parameters = [None if tensor is None else tensor.contiguous() for tensor in weights]
    own = [getattr(sums.pool, name) for name in _SUMS]
    call = _Call(
        *(heads, key_heads, width, sketched_width, size, output.shape[3], ring.key.shape[2], hidden.shape[3]),
        *(normed, removed, SUM_KINDS.index(own[0].dtype), SUM_KINDS.index(ring.key.dtype)),
        *map(TensorPointer.of, rows),
        *map(_address, parameters),
        *(TensorPointer.of(ring.key), TensorPointer.of(ring.value), ring.real.data_ptr(), ring.real.stride(0)),
        *map(TensorPointer.of_heads, own),
        *map(_address, (ring.position, ring.rows, sums.rows)),
    )
    program, units = library().polysketch_one, batch * key_heads
    if units * size * size * output.shape[3] < SUMS_WORTH_A_THREAD:
        run_program(program, call, range(units))
    else:
        run_in_threads(program, call, units, [*rows, *parameters, *own, *ring, sums.rows])
    sums.advance_()
    return output


def _innermost_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
