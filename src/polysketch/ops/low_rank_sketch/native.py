"""The sketch as programs in C++ (`ops/native/source`), on a CPU.

They compute in float32, of half precision too. A thread works on whole maps, or on parts of the tokens where there are
fewer maps than threads. Linear maps stay in cache between the product that makes them and the one that takes them;
backward makes them again.
"""

import ctypes
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.native import TensorPointer, in_float32, library, run_in_threads, run_program
from polysketch.ops.native import why_not as why_no_program
from polysketch.ops.parallel import num_workers

_LANES = 16  # of the widest vectors: rows are whole vectors on every machine
_SIZES = ("batch", "heads", "maps", "tokens", "inputs", "features", "rank", "degree", "row", "input_row", "parts")
_FEWEST = 16  # tokens of a call worth a program: PyTorch's products read one token as fast, in float32
# Fewer products than this are one thread's work: waking another costs more.
_PRODUCTS_WORTH_A_THREAD = 2**21


class _Call(ctypes.Structure):
    """`LowRankSketchCall` of low_rank_sketch.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, TensorPointer) for name in ("x", "output")),
        *((name, ctypes.c_void_p) for name in ("factors", "turned")),
        *((name, TensorPointer) for name in ("output_gradient", "x_gradient")),
        ("factor_gradients", ctypes.c_void_p),
    )


def why_not(x: Tensor, factors: Tensor) -> str | None:
    """Why the programs do not take a call with tensors like these; None where they do."""
    if (x.dtype == torch.float32 and x.shape[2] < _FEWEST) or not (x.shape[3] and factors.shape[-1]):
        return f"the native backend is for {_FEWEST} tokens or more, got {tuple(x.shape)}"
    return why_no_program(x) or why_no_program(factors)


def forward(x: Tensor, factors: Tensor) -> Tensor:
    """The features; arguments as `low_rank_sketch`."""
    given, x, columns = x.dtype, _in_rows(x), _whole_vectors(factors)
    output = x.new_empty(*x.shape[:3], factors.shape[-1])
    call = _call(x, factors)
    call.output, call.factors = TensorPointer.of(output), columns.data_ptr()
    _run("forward", call, x, columns, [output])
    return output.to(given)


def backward(upstream: Tensor, x: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the factors."""
    given, x, upstream = x.dtype, _in_rows(x), _in_rows(upstream)
    columns, turned = _whole_vectors(factors), _whole_vectors(factors.mT)
    of_x = x.new_empty(x.shape)
    call = _call(x, factors)
    # Every unit sums gradients of its own, added in order: the same result whichever thread is first.
    of_units = x.new_zeros(call.maps, call.parts, *columns.shape[1:])
    call.factors, call.turned, call.factor_gradients = columns.data_ptr(), turned.data_ptr(), of_units.data_ptr()
    call.output_gradient, call.x_gradient = TensorPointer.of(upstream), TensorPointer.of(of_x)
    _run("backward", call, x, columns, [upstream, turned, of_x, of_units])
    of_factors = of_units.sum(1)[..., : factors.shape[-1]].contiguous()
    return of_x.to(given), of_factors.to(factors.dtype)


def _call(x: Tensor, factors: Tensor) -> _Call:
    maps, rank, degree, inputs, features = factors.shape
    threads = num_workers(x.device) if _is_worth_threads(x, factors) else 1
    sizes = (*x.shape[:2], maps, x.shape[2], inputs, features, rank, degree, _whole(features), _whole(inputs))
    return _Call(*sizes, threads // math.gcd(maps, threads), TensorPointer.of(x))


def _is_worth_threads(x: Tensor, factors: Tensor) -> bool:
    return x.shape[:3].numel() * factors[0].numel() >= _PRODUCTS_WORTH_A_THREAD


def _run(program: str, call: _Call, x: Tensor, factors: Tensor, others: list[Tensor]) -> None:
    function, units = getattr(library(), f"low_rank_sketch_{program}"), call.maps * call.parts
    if _is_worth_threads(x, factors):
        run_in_threads(function, call, units, [x, factors, *others])
    else:
        run_program(function, call, range(units))


def _whole(count: int) -> int:
    return -(-count // _LANES) * _LANES


def _whole_vectors(factors: Tensor) -> Tensor:
    """In rows of whole vectors, zeros behind."""
    factors, missing = in_float32(factors), _whole(factors.shape[-1]) - factors.shape[-1]
    return (F.pad(factors, (0, missing)) if missing else factors).contiguous()  # padding by nothing would be a copy


def _in_rows(x: Tensor) -> Tensor:
    """x with the numbers of a token side by side."""
    x = in_float32(x)
    return x if x.stride(3) == 1 else x.contiguous()
