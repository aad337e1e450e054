"""The native backend: the memory as a program in C++ (`ops/native/source/delta_memory.cpp`), float32 on a CPU.

Every thread works through key heads of its own, one token after another.
"""

import ctypes
from collections.abc import Callable

from torch import Tensor

from polysketch.ops.delta_memory.types import Inputs
from polysketch.ops.native import TensorPointer, library, run_in_threads, run_program
from polysketch.ops.native import why_not as why_no_program

_SIZES = ("heads", "key_heads", "tokens", "kept", "size", "value_width")
_ROWS = (*Inputs._fields, "recalled", "written")
_GRADIENTS = ("gradient", "of_query", "of_key", "of_value", "of_strength")
# Fewer products than this are one thread's work: waking another costs more.
_PRODUCTS_WORTH_A_THREAD = 2**19


class _Call(ctypes.Structure):
    """`DeltaMemoryCall` of delta_memory.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, TensorPointer) for name in _ROWS),
        ("sums", ctypes.c_void_p),
        *((name, TensorPointer) for name in _GRADIENTS),
    )


def why_not(value: Tensor) -> str | None:
    """Why the program cannot take a call with values like these; None where it can."""
    return why_no_program(value)


def recall(inputs: Inputs, size: int, sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `reference.recall`; `sums` (contiguous) move on in place."""
    rows, value = _rows(inputs), inputs.value
    recalled = value.new_empty(*inputs.query_weights.shape[:3], value.shape[3])
    rows += [recalled, value.new_empty(value.shape)]
    start = None if sums is None else sums.data_ptr()
    none = [TensorPointer() for _ in _GRADIENTS]
    call = _Call(*_sizes(inputs, size), *(TensorPointer.of(x) for x in rows), start, *none)
    _run(library().delta_memory, call, inputs, [*rows, sums])
    return recalled, rows[-1]


def gradients(inputs: Inputs, size: int, written: Tensor, gradient: Tensor) -> list[Tensor]:
    """Gradients of the query's and the key's weights, the value and the strength, of an empty memory's recall."""
    rows = [*_rows(inputs), written, written]  # what is recalled is not read
    wanted = (inputs.query_weights, inputs.key_weights, inputs.value, inputs.strength)
    kept = [gradient.contiguous(), *(x.new_empty(x.shape) for x in wanted)]
    pointers = (TensorPointer.of(x) for x in kept)
    call = _Call(*_sizes(inputs, size), *(TensorPointer.of(x) for x in rows), None, *pointers)
    _run(library().delta_memory_backward, call, inputs, [*rows, *kept])
    return kept[1:]


def _sizes(inputs: Inputs, size: int) -> tuple[int, ...]:
    heads, length, width = inputs.query_weights.shape[1:]
    return heads, inputs.value.shape[1], length, width // 2, size, inputs.value.shape[3]


def _rows(inputs: Inputs) -> list[Tensor]:
    return [x if x.dim() == 3 or x.stride(3) == 1 else x.contiguous() for x in inputs]


def _run(program: Callable[..., int], call: _Call, inputs: Inputs, tensors: list[Tensor | None]) -> None:
    units = inputs.value.shape[0] * inputs.value.shape[1]
    if inputs.query_weights.numel() * call.kept * call.value_width < _PRODUCTS_WORTH_A_THREAD:
        run_program(program, call, range(units))
    else:
        run_in_threads(program, call, units, tensors)
