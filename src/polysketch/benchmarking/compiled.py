"""What the compiler makes of the Triton programs of a call, for a device that need not be there."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polysketch.ops.custom_op import OPERATORS
from polysketch.ops.triton.ahead_of_time import SHARED_MEMORY, Compiled, compiling

__all__ = ["compile_call", "complaints", "inside_operators", "shared_memory_limit"]


def compile_call(function: Callable[[], Any], capability: tuple[int, int]) -> list[Compiled]:
    """The programs that a call on tensors of the "meta" device launches, in order, compiled and not run.

    Args:
        function: of nothing; may take gradients, whose programs come too.
        capability: compute capability of the device asked about, (9, 0) for the H100.

    Raises:
        RuntimeError: Triton's interpreter is on; or what the compiler says.
    """
    with compiling(capability) as found, inside_operators():
        function()
    return found


@contextmanager
def inside_operators() -> Iterator[None]:
    """Within this block calls on "meta" tensors go through our operators' own code, down to what they launch."""
    with _without_autocast(), _OperatorsInside():
        yield


def shared_memory_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that shipped programs may take; those of sm_80 run on all of its kin, which have less."""
    if capability == (8, 0):
        return min(bytes_ for kin, bytes_ in SHARED_MEMORY.items() if kin[0] == 8)
    return SHARED_MEMORY[capability]


def complaints(program: Compiled, capability: tuple[int, int]) -> list[str]:
    """What is wrong with a program as compiled; empty where nothing is."""
    found = [f"spills {program.spills} bytes"] if program.spills else []
    limit = shared_memory_limit(capability)
    return found + ([f"shared memory {program.shared} over {limit}"] if program.shared > limit else [])


class _OperatorsInside(TorchDispatchMode):
    """Go into our operators on "meta" tensors, where torch.library would ask for shapes alone.

    A number read from such a tensor is 0: nothing is padded, every state is at its beginning.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        operator = OPERATORS.get(func.name())
        inside: Callable[..., Any] = func if operator is None else operator.compute
        with torch.no_grad():
            return inside(*args, **(kwargs or {}))


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Let autocast on "meta" do nothing inside: PyTorch refuses the device, even to switch it off."""
    before: Any = torch.autocast

    def autocast(device_type: str, *arguments: Any, **options: Any) -> AbstractContextManager[Any]:
        return nullcontext() if device_type == "meta" else before(device_type, *arguments, **options)

    torch.autocast = autocast  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.autocast = before  # type: ignore[misc]
