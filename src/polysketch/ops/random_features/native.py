"""Random features as a program in C++ (`ops/native/source`), on a CPU.

It computes in float32, of half precision too. A thread works on a run of blocks of tokens; the projections of a block
stay in cache until they are features.
"""

import ctypes
import math

import torch
from torch import Tensor

from polysketch.ops.native import TensorPointer, expect_writes, in_float32, library, run_in_threads, run_program
from polysketch.ops.native import why_not as why_no_program
from polysketch.ops.random_features.reference import LARGEST_EXPONENT, RELU_EPSILON, SOFTMAX_EPSILON

_LINE = 16  # numbers of a cache line: rows are whole vectors on every machine
_BLOCK = 32  # tokens of a block; `kTokens` of random_features.h
_FEWEST = 16  # tokens of a call worth the program: PyTorch's operations are as fast on one
# Fewer products than this are one thread's work: waking another costs more.
_PRODUCTS_WORTH_A_THREAD = 2**21
_OF_QUERIES, _OF_KEYS, _RELU = range(3)


class _Call(ctypes.Structure):
    """`RandomFeaturesCall` of random_features.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "inputs", "features", "kind")),
        *((name, ctypes.c_int64) for name in ("row", "input_row")),
        *((name, ctypes.c_float) for name in ("scale", "epsilon", "largest", "constant", "input_scale")),
        *((name, TensorPointer) for name in ("x", "output", "output_gradient", "x_gradient")),
        *((name, ctypes.c_void_p) for name in ("columns", "rows")),
    )


def why_not(x: Tensor, weight: Tensor) -> str | None:
    """Why the program does not take a call with tensors like these; None where it does."""
    if x.shape[2] < _FEWEST or 0 in x.shape:
        return f"the native backend is for {_FEWEST} tokens or more, got {tuple(x.shape)}"
    if torch.is_grad_enabled() and weight.requires_grad:
        return "the native backend has no gradient of the random weights, which require one"
    return why_no_program(x)


def forward(x: Tensor, weight: Tensor, key_constant: Tensor | None, kind: str) -> Tensor:
    """The features; arguments as `random_features`."""
    x, columns = _in_rows(x), _padded(weight.mT, weight.shape[1] ** -0.25)
    output = expect_writes(x.new_empty(*x.shape[:3], weight.shape[0]))
    call = _call(x, weight, key_constant, kind)
    call.output, call.columns, call.row = TensorPointer.of(output), columns.data_ptr(), columns.shape[1]
    _run("forward", call, [x, columns, output])
    return output


def backward(
    upstream: Tensor, features: Tensor, x: Tensor, weight: Tensor, key_constant: Tensor | None, kind: str
) -> Tensor:
    """The gradient of x, in its dtype.

    Args:
        upstream: that of the features.
        features: what `forward` gave.
        x, weight, key_constant, kind: what it was given.
    """
    given, x, rows = x.dtype, _in_rows(x), _padded(weight, weight.shape[1] ** -0.25)
    upstream, of_x = _in_rows(upstream), x.new_empty(x.shape)
    call = _call(x, weight, key_constant, kind)
    call.output, call.output_gradient = TensorPointer.of(features), TensorPointer.of(upstream)
    call.x_gradient, call.rows, call.input_row = TensorPointer.of(of_x), rows.data_ptr(), rows.shape[1]
    _run("backward", call, [x, rows, features, upstream, of_x])
    return of_x.to(given)


def _call(x: Tensor, weight: Tensor, key_constant: Tensor | None, kind: str) -> _Call:
    number = _RELU if kind == "relu" else _OF_QUERIES if key_constant is None else _OF_KEYS
    constant = 0.0 if key_constant is None else float(key_constant)
    epsilon = RELU_EPSILON if kind == "relu" else SOFTMAX_EPSILON * math.exp(-constant)
    sizes, scale = (*x.shape, weight.shape[0], number, 0, 0), weight.shape[0] ** -0.5
    numbers = (scale, epsilon * scale, LARGEST_EXPONENT, constant, x.shape[3] ** -0.5)
    return _Call(*sizes, *numbers, TensorPointer.of(x))


def _run(program: str, call: _Call, tensors: list[Tensor]) -> None:
    function = getattr(library(), f"random_features_{program}")
    blocks = call.batch * call.heads * -(-call.tokens // _BLOCK)
    if call.batch * call.heads * call.tokens * call.inputs * call.features < _PRODUCTS_WORTH_A_THREAD:
        run_program(function, call, range(blocks))
    else:
        run_in_threads(function, call, blocks, tensors)


def _padded(matrix: Tensor, scale: float) -> Tensor:
    """The matrix times a scale, in rows of an odd number of cache lines, zeros behind.

    Rows a power of two apart would drive one another out of the first cache.
    """
    rows, width = matrix.shape
    padded = matrix.new_zeros(rows, -(-width // (2 * _LINE)) * 2 * _LINE + _LINE, dtype=torch.float32)
    padded[:, :width] = in_float32(matrix.detach()) * scale
    return padded


def _in_rows(x: Tensor) -> Tensor:
    """x with the numbers of a token side by side."""
    x = in_float32(x)
    return x if x.stride(3) == 1 else x.contiguous()
