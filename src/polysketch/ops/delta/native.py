"""The native backend: the delta rule as a program in C++ (`ops/native/source/delta_errors.cpp`), float32 on a CPU.

Every thread works through heads of its own, 32 tokens at a time.
"""

import ctypes

from torch import Tensor

from polysketch.ops.delta.types import Inputs
from polysketch.ops.native import TensorPointer, library, run_in_threads, run_program
from polysketch.ops.native import why_not as why_no_program

_SIZES = ("heads", "tokens", "features", "value_width", "factors")
_ROWS = ("key", "value", "strength", "errors")
# Fewer products than this are one thread's work: waking another costs more.
_PRODUCTS_WORTH_A_THREAD = 2**21


class _Call(ctypes.Structure):
    """`DeltaErrorsCall` of delta_errors.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, TensorPointer) for name in _ROWS),
        ("sums_in", ctypes.c_void_p),
    )


def why_not(inputs: Inputs) -> str | None:
    """Why the program cannot take a call with tensors like these; None where it can."""
    return why_no_program(inputs.key)


def errors(inputs: Inputs, factors: int) -> Tensor:
    """(batch, heads, length, value_dim): each value less what the sums before its token say of it."""
    key, value, strength, sums = inputs
    (batch, heads, length, features), width = key.shape, value.shape[3]
    found = value.new_empty(batch, heads, length, width)
    rows = [x if x.dim() == 3 or x.stride(3) == 1 else x.contiguous() for x in (key, value, strength, found)]
    start = None if sums is None else sums.contiguous()
    call = _Call(
        *(heads, length, features, width, factors),
        *(TensorPointer.of(x) for x in rows),
        None if start is None else start.data_ptr(),
    )
    program, units = library().delta_errors, batch * heads
    if units * length * (features // factors) ** factors * width < _PRODUCTS_WORTH_A_THREAD:
        run_program(program, call, range(units))
    else:
        run_in_threads(program, call, units, [*rows, start])
    return found
