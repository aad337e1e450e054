"""One token of every row against a state, as a program in C++ that updates the state where it lies."""

import ctypes

import torch
from torch import Tensor

from polysketch.ops.linear.state import LinearAttentionState
from polysketch.ops.linear.types import Inputs, Plan
from polysketch.ops.native import TensorPointer, library, run_in_threads, run_program, why_not

_SIZES = ("heads", "key_heads", "features", "value_width", "local_width")
_OPTIONS = ("power", "normalize", "degree", "chunk", "expanded")
_INPUTS = ("query", "key", "value", "local_query", "local_key", "log_decay", "output")
_STATE = ("sums", "normalizer", "log_decay", "open_features", "open_value", "open_key", "open_log_decay", "position")
# Fewer sums than this are read by one thread: waking another costs more.
_SUMS_WORTH_A_THREAD = 2**20


class _ExtendCall(ctypes.Structure):
    """`ExtendCall` of linear_attention_extend.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES + _OPTIONS),
        ("offset", ctypes.c_float),
        *((name, TensorPointer) for name in _INPUTS),
        *((f"state_{name}", ctypes.c_void_p) for name in _STATE),
    )


def can_extend(query: Tensor, state: LinearAttentionState) -> bool:
    """Whether the program can take this call: float32 on a CPU, a state that lies in one piece, a compiler."""
    if why_not(query) is not None or state.sums.dtype != torch.float32:
        return False
    return all(tensor.is_contiguous() for tensor in state.tensors().values())


def extend_one_(inputs: Inputs, plan: Plan, state: LinearAttentionState) -> Tensor:
    """One token, already checked, features and value float32; the state moves on.

    A decay may come in another dtype: the program reads everything as float32.
    """
    query, key, value, local_query, local_key, log_decay, *_ = inputs
    (batch, heads, _, features), key_heads, width = query.shape, key.shape[1], value.shape[3]
    output = value.new_empty(batch, heads, 1, width)
    chunk, local_width = (0, 0) if local_key is None else (plan.chunk, local_key.shape[3])
    rows = [query, key, value, local_query, local_key, log_decay, output]
    kept = [None if tensor is None else _innermost_contiguous(tensor.float()) for tensor in rows]
    call = _ExtendCall(
        *(heads, key_heads, features, width, local_width),
        *(state.power, plan.normalize, plan.degree, chunk, state.sums.shape[2]),
        plan.offset,
        *(TensorPointer() if tensor is None else TensorPointer.of(tensor) for tensor in kept),
        *(getattr(state, name).data_ptr() for name in _STATE),
    )
    program, units = library().linear_attention_extend, batch * key_heads
    if state.sums.numel() < _SUMS_WORTH_A_THREAD:
        run_program(program, call, range(units))
    else:
        run_in_threads(program, call, units, [*kept, *state.tensors().values()])
    state.advance_()
    return output


def _innermost_contiguous(tensor: Tensor) -> Tensor:
    if tensor.dim() == 3 or tensor.shape[3] == 1 or tensor.stride(3) == 1:
        return tensor
    return tensor.contiguous()
