"""The networks of the learned sketch as a program in C++ (`ops/native/source`), on a CPU.

They compute in float32, of half precision too; x in bfloat16 is multiplied so where that is faster
(`ops/native/bfloat16.py`). Every thread works through blocks of 32 rows of its own; weights and
activations stay in cache.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from polysketch.ops.learned_sketch.gradients import dtype_of_all, length_of_all, parts_of
from polysketch.ops.learned_sketch.networks import Networks
from polysketch.ops.native import (
    TensorPointer,
    in_float32,
    library,
    run_in_threads,
    run_program,
    shares_of,
    why_not,
)
from polysketch.ops.native.bfloat16 import Precision, precision
from polysketch.ops.parallel import run_in_parallel

__all__ = ["backward", "forward", "why_not"]

_BLOCK = 32  # kBlock of learned_sketch.h
_SIZES = ("batch", "heads", "length", "inputs", "size", "hidden", "leaves", "depth", "maps", "activation", "precision")
_ACTIVATIONS = ("gelu", "relu", "silu")  # kGelu, kRelu, kSilu of learned_sketch.h


class _Call(ctypes.Structure):
    """`LearnedSketchCall` of learned_sketch.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, TensorPointer) for name in ("x", "features")),
        ("weights", ctypes.c_void_p),
        *((name, TensorPointer) for name in ("features_gradient", "x_gradient")),
        ("weight_gradients", ctypes.c_void_p),
    )


def forward(x: Tensor, weights: list[Tensor], networks: Networks) -> Tensor:
    """phi(x); arguments as in `learned_sketch`."""
    given, by = x.dtype, precision(x)
    x, weights = _innermost_contiguous(x), _plain(weights)
    features = x.new_empty(*x.shape[:-1], weights[-1].shape[0])
    call = _call(x, weights, networks, by)
    call.features = TensorPointer.of(features)
    pointers = _pointers(weights)
    call.weights = ctypes.addressof(pointers)
    run_in_threads(library().learned_sketch_forward, call, _blocks(call), [x, features, *weights])
    return features.to(given)


def backward(grad: Tensor, x: Tensor, weights: list[Tensor], networks: Networks) -> tuple[Tensor, Tensor]:
    """Gradients of x and of all weights (`gradients`)."""
    given, by = x.dtype, precision(x)
    x, grad, plain = _innermost_contiguous(x), _innermost_contiguous(grad), _plain(weights)
    grad_x = x.new_empty(x.shape)  # never of the default dtype or device: the program writes float32
    shares = shares_of(_blocks(_call(x, plain, networks, by)))
    # Each thread sums gradients of its own, added in order: the same result whichever thread is first.
    totals = [plain[0].new_zeros(length_of_all(plain)) for _ in shares]
    pointers = _pointers(plain)

    def work(share: Sequence[tuple[int, Sequence[int]]]) -> None:
        for thread, blocks in share:
            call, gradients = _call(x, plain, networks, by), _pointers(parts_of(totals[thread], plain))
            call.weights, call.weight_gradients = ctypes.addressof(pointers), ctypes.addressof(gradients)
            call.features_gradient, call.x_gradient = TensorPointer.of(grad), TensorPointer.of(grad_x)
            run_program(library().learned_sketch_backward, call, blocks)

    run_in_parallel(work, [[(thread, share)] for thread, share in enumerate(shares)])
    summed = totals[0]
    for other in totals[1:]:
        summed.add_(other)
    return grad_x.to(given), summed.to(dtype_of_all(weights))


def _call(x: Tensor, weights: list[Tensor], networks: Networks, by: Precision) -> _Call:
    hidden, size = weights[2].shape[0], weights[-1].shape[0]
    maps = len(weights) // networks.tensors
    activation = _ACTIVATIONS.index(networks.activation)
    return _Call(*x.shape, size, hidden, networks.leaves, networks.depth, maps, activation, by, TensorPointer.of(x))


def _innermost_contiguous(x: Tensor) -> Tensor:
    x = in_float32(x)
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _plain(weights: list[Tensor]) -> list[Tensor]:
    ready = (weight.dtype == torch.float32 and weight.is_contiguous() for weight in weights)
    return [
        weight if is_ready else weight.detach().float().contiguous()
        for weight, is_ready in zip(weights, ready, strict=True)
    ]


def _pointers(tensors: list[Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _blocks(call: _Call) -> int:
    """Blocks of rows, counted over all maps."""
    return call.maps * -(-(call.batch * call.heads // call.maps * call.length) // _BLOCK)
