"""How tensors are handed to the programs, and which of them can be.

Programs compute in float32. Tensors of half precision are copied into it at their border: a copy costs one read of each
number, where PyTorch's products in half precision take ten times as long as in float32 on processors without an
instruction for them.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polysketch.ops.native.build import library, why_unavailable
from polysketch.ops.parallel import deal, num_workers, run_in_parallel

# Bytes from which the C library asks the kernel at every allocation; less than that it keeps, and gives out again.
_ALWAYS_NEW = 2**25


class TensorPointer(ctypes.Structure):
    """`Tensor` of memory.h: an address and three strides, in elements; the last stride is 1."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "token")))

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorPointer":
        """Of (batch, heads, tokens) or (batch, heads, tokens, width) in float32; the caller keeps the tensor alive."""
        return cls(tensor.data_ptr(), *tensor.stride()[:3])

    @classmethod
    def of_heads(cls, tensor: Tensor) -> "TensorPointer":
        """Of (batch, heads, ...), what belongs to a head lying in one piece, without a stride of tokens."""
        return cls(tensor.data_ptr(), *tensor.stride()[:2], 0)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of tensors that the programs are given."""


def in_float32(tensor: Tensor) -> Tensor:
    """What a program reads: the tensor itself, or a copy of one in half precision."""
    return tensor if tensor.dtype == torch.float32 else tensor.float()


def why_not(tensor: Tensor) -> str | None:
    """Why the programs cannot take a call whose tensors are like this one; None where they can."""
    if tensor.device.type != "cpu":
        return f"the native backend runs on a CPU, got tensors on {tensor.device}"
    if tensor.dtype not in DTYPES:
        return f"the native backend takes float32, bfloat16 and float16, got {tensor.dtype}"
    return why_unavailable()


def expect_writes(tensor: Tensor) -> Tensor:
    """The same tensor, new and contiguous, which a program is about to fill: a large one in pages of 2 MB, on Linux.

    Each page waits for the kernel at its first write, and 64 MB are 16,384 pages of 4 KB.
    """
    size = tensor.numel() * tensor.element_size()
    if size >= _ALWAYS_NEW:
        library().advise_huge_pages(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(size))
    return tensor


def shares_of(count: int) -> list[Sequence[int]]:
    """Items 0..count - 1 in runs, one for each thread."""
    return deal(range(count), num_workers(torch.device("cpu")))


def run_program(program: Callable[..., int], call: ctypes.Structure, share: Sequence[int]) -> None:
    """Run `program(call, first, last)` on a run of items, if there are any.

    Raises:
        MemoryError: it says that memory ran out.
    """
    if not share:
        return
    if program(ctypes.byref(call), ctypes.c_int64(share[0]), ctypes.c_int64(share[-1] + 1)):
        raise MemoryError(f"not enough memory for a native program on {len(share)} of its items")


def run_in_threads(
    program: Callable[..., int], call: ctypes.Structure, count: int, tensors: Sequence[Tensor | None]
) -> None:
    """Run the program on items 0..count - 1, dealt out to the threads; the interpreter lock is free meanwhile.

    Args:
        program: of the compiled library.
        call: its arguments, addresses among them.
        count: of items.
        tensors: whatever `call` has an address of; they live until every thread is done.
    """

    def work(share: Sequence[int], _tensors: Sequence[Tensor | None] = tensors) -> None:
        run_program(program, call, share)

    run_in_parallel(work, shares_of(count))
