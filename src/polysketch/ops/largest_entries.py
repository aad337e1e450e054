"""Which entries of vectors are the largest: where a sparse sketch keeps anything."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.custom_op import custom_op
from polysketch.ops.native import library, run_in_threads, run_program
from polysketch.ops.native import why_not as why_no_program

# Fewer entries than this are one thread's work: waking another costs more.
_ENTRIES_WORTH_A_THREAD = 2**16


class _Call(ctypes.Structure):
    """`LargestEntriesCall` of largest_entries.cpp."""

    _fields_ = (
        ("width", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("entries", ctypes.c_void_p),
    )


def largest_entries(x: Tensor, count: int) -> Tensor:
    """The places of the `count` entries of largest size of every vector, the largest first.

    Args:
        x: (..., width), floating point.
        count: 1 to width.

    Returns:
        (..., count) int32. Of equal entries any may come first; NaN counts as the largest. It has no gradient.

    Raises:
        ValueError: a count out of range.

    Cost: `count` maxima of every vector by a native program for float32 on a CPU; by `torch.topk` otherwise.
    """
    if not 1 <= count <= x.shape[-1]:
        raise ValueError(f"count must be 1 to {x.shape[-1]}, the width of x, got {count}")
    x = x.detach()
    if why_no_program(x) is not None:
        return x.abs().topk(count, -1).indices.to(torch.int32)
    return largest_entries_operator(x, count)


@custom_op("polysketch::largest_entries", "(Tensor x, int count) -> Tensor")
def largest_entries_operator(*arguments: Any) -> Tensor:
    """By the native program."""
    x, count = arguments
    rows = x.contiguous()
    found = torch.empty(*x.shape[:-1], count, dtype=torch.int32)
    call = _Call(x.shape[-1], count, rows.data_ptr(), found.data_ptr())
    vectors = found.numel() // count
    if rows.numel() < _ENTRIES_WORTH_A_THREAD:
        run_program(library().largest_entries, call, range(vectors))
    else:
        run_in_threads(library().largest_entries, call, vectors, [rows, found])
    return found


@largest_entries_operator.register_fake
def _(*arguments: Any) -> Tensor:
    x, count = arguments
    return x.new_empty((*x.shape[:-1], count), dtype=torch.int32)
