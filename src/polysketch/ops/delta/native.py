"""The native backend: the delta rule as programs in C++ (`ops/native/source/delta_rule*.cpp`), float32 on a CPU.

Every thread works through heads of its own, 32 tokens at a time.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.delta.types import Inputs
from polysketch.ops.native import TensorPointer, library, run_in_threads, run_program
from polysketch.ops.native import why_not as why_no_program

_SIZES = ("heads", "key_heads", "tokens", "features", "value_width", "factors")
_ROWS = ("key", "value", "strength", "errors")
_QUERY_ROWS = ("query", "output")
_GRADIENTS = ("output_gradient", "query_gradient", "key_gradient", "value_gradient", "strength_gradient")
# Fewer products than this are one thread's work: waking another costs more.
_PRODUCTS_WORTH_A_THREAD = 2**21


class _Call(ctypes.Structure):
    """`DeltaRuleCall` of delta_rule.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, TensorPointer) for name in _ROWS),
        ("sums_in", ctypes.c_void_p),
        *((name, TensorPointer) for name in (*_QUERY_ROWS, *_GRADIENTS)),
    )


def why_not(inputs: Inputs) -> str | None:
    """Why the program cannot take a call with tensors like these; None where it can."""
    return why_no_program(inputs.key)


def errors(inputs: Inputs, factors: int) -> Tensor:
    """(batch, heads, length, value_dim): each value less what the sums before its token say of it."""
    found = inputs.value.new_empty(inputs.value.shape)
    rows = {"key": inputs.key, "value": inputs.value, "strength": inputs.strength, "errors": found}
    _run(library().delta_rule, rows, factors, inputs.key.shape[1], inputs.sums)
    return found


def attention(query: Tensor, inputs: Inputs, factors: int) -> tuple[Tensor, Tensor]:
    """What the sums answer to each query once its token is written, and the errors; one pass over the sums.

    Args:
        query: (batch, query heads, length, r), query features; several heads may share a head of keys.
        inputs: of the same tokens.
        factors: as in `delta_writes`.
    """
    value = inputs.value
    found = value.new_empty(value.shape)
    output = value.new_empty(*query.shape[:3], value.shape[3])
    rows = {"key": inputs.key, "value": value, "strength": inputs.strength, "errors": found}
    _run(library().delta_rule, rows | {"query": query, "output": output}, factors, query.shape[1], inputs.sums)
    return output, found


def attention_backward(
    query: Tensor, key: Tensor, strength: Tensor, errors: Tensor, upstream: Tensor, factors: int
) -> list[Tensor]:
    """Gradients of query, key, value and strength of `attention` from no sums.

    Args:
        query, key, strength, factors: of the forward call.
        errors: that it gave.
        upstream: the gradient of its output.
    """
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, errors, strength)]
    rows = {"key": key, "strength": strength, "errors": errors, "query": query, "output_gradient": upstream}
    rows |= dict(zip(_GRADIENTS[1:], found, strict=True))
    _run(library().delta_rule_backward, rows, factors, query.shape[1], None)
    return found


def _run(program: Any, given: dict[str, Tensor], factors: int, heads: int, sums: Tensor | None) -> None:
    """Run a program on all heads of keys, tensors by their names in `_Call`."""
    (batch, key_heads, length, features), width = given["key"].shape, given["errors"].shape[3]
    rows = {name: x if x.dim() == 3 or x.stride(3) == 1 else x.contiguous() for name, x in given.items()}
    start = None if sums is None else sums.contiguous()
    call = _Call(heads, key_heads, length, features, width, factors)
    call.sums_in = None if start is None else start.data_ptr()
    for name, tensor in rows.items():
        setattr(call, name, TensorPointer.of(tensor))
    units = batch * key_heads
    if units * length * (features // factors) ** factors * width < _PRODUCTS_WORTH_A_THREAD:
        run_program(program, call, range(units))
    else:
        run_in_threads(program, call, units, [*rows.values(), start])
