"""Whether the programs multiply in bfloat16, by instructions of the processor that are found at run time: AMX.

Factors are rounded to bfloat16 and sums are in float32, for tensors in bfloat16 where that was measured to be faster.
Everything else is in float32.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch
from torch import Tensor

from polysketch.ops.native.build import library


class Instructions(IntEnum):
    """`Instructions` of bfloat16.h."""

    PLAIN_VECTORS = 0
    AVX512_BF16 = 1
    AMX = 2


class Precision(IntEnum):
    """`Precision` of bfloat16.h."""

    FLOAT32 = 0
    BFLOAT16 = 1


_required: list[bool] = []


def instructions() -> Instructions:
    """The best instructions for bfloat16 of this processor; plain vectors where it has none."""
    return Instructions(library().bfloat16_instructions())


def precision(*tensors: Tensor, gains: bool = True) -> Precision:
    """What a program multiplies tensors like these in: in bfloat16 by AMX alone, for AVX-512 BF16 gained nothing.

    Args:
        tensors: its inputs.
        gains: whether the program is faster by AMX.
    """
    if any(tensor.dtype != torch.bfloat16 for tensor in tensors):
        return Precision.FLOAT32
    is_used = _required[-1] if _required else gains and instructions() == Instructions.AMX
    return Precision.BFLOAT16 if is_used else Precision.FLOAT32


@contextmanager
def products_in_bfloat16(required: bool) -> Iterator[None]:
    """Within this block tensors in bfloat16 are multiplied so, or in float32, whatever the processor has.

    Without instructions for it plain vectors compute the same sums, slower than in float32.

    Args:
        required: whether in bfloat16.
    """
    _required.append(required)
    try:
        yield
    finally:
        _required.pop()


def product(
    left: Tensor, right: Tensor, by: Instructions, *, result: Tensor, add: bool = True, lost: Tensor | None = None
) -> Tensor:
    """One product as the programs make it, into `result`: what shows whether the instructions compute it.

    Args:
        left: (rows, depth) in float32; one of its strides is 1.
        right: (depth, width) in float32, rows contiguous; width a multiple of 16.
        by: instructions that this processor has.
        result: (rows, width) in float32, contiguous.
        add: whether to what `result` holds.
        lost: what earlier additions rounded off, likewise; None to leave it.
    """
    strides = (*left.stride(), right.stride(0), result.stride(0))
    sizes = (by, *left.shape, right.shape[1])
    numbers = [ctypes.c_int64(number) for number in (*sizes, *strides, add)]
    tensors = [ctypes.c_void_p(None if one is None else one.data_ptr()) for one in (left, right, result, lost)]
    library().bfloat16_product(*numbers, *tensors)
    return result
