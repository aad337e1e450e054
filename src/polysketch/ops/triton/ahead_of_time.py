"""Compile the programs of a call for a device that is not there, and read what the compiler made of them.

A call runs on tensors of the "meta" device, which have shapes and no memory; each launch is compiled as it stands, for
the compute capability asked for, by the compiler that Triton brings.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polysketch.ops.custom_op import OPERATORS
from polysketch.ops.triton import assembler
from polysketch.ops.triton.configurations import as_if_on
from polysketch.ops.triton.launch import launching
from polysketch.ops.triton.machine_code import Listing

SHARED_MEMORY = {(8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448, (10, 0): 232_448}
"""Bytes that one program may have, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
_TENSOR_CORE = {"HMMA", "HGMMA", "UTCHMMA", "UTCQMMA"}


class Compiled(NamedTuple):
    """One program as compiled.

    Attributes:
        name: of the kernel.
        constants: its constants and launch options.
        registers: of a thread.
        spills: bytes of a thread's registers that went to memory.
        shared: bytes of shared memory.
        opcodes: how often each instruction stands in the listing, by its first word.
        unset: what reads a uniform register that nothing wrote before.
    """

    name: str
    constants: dict[str, Any]
    registers: int
    spills: int
    shared: int
    opcodes: Counter[str]
    unset: list[str]

    @property
    def tensor_core(self) -> int:
        """Tensor-core instructions in the listing."""
        return sum(count for name, count in self.opcodes.items() if name in _TENSOR_CORE)


@contextmanager
def compiling(capability: tuple[int, int]) -> Iterator[list[Compiled]]:
    """Within this block launches are compiled, not run; the list fills with what came out.

    Raises:
        RuntimeError: Triton's interpreter is on, which compiles nothing; or no assembler is there that is right.
    """
    from polysketch.ops.triton.availability import interpreting

    if interpreting():
        raise RuntimeError("nothing is compiled under Triton's interpreter; unset TRITON_INTERPRET")
    why_not = assembler.prepare(capability)
    if why_not is not None:
        raise RuntimeError(why_not)
    found: list[Compiled] = []

    def compile_launch(kernel: Any, programs: int, arguments: tuple, options: dict) -> None:
        made = kernel.warmup(*arguments, grid=(1,), **options)
        found.append(_read(kernel.__name__, options, made))

    with _active_device(capability), as_if_on(capability), launching(compile_launch):
        yield found


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


def complaints(program: Compiled, capability: tuple[int, int]) -> list[str]:
    """What is wrong with a program as compiled; empty where nothing is.

    Those of sm_80 run on all of its kin, and may take as much shared memory as the one that has the least.
    """
    kin = [one for one in SHARED_MEMORY if one == capability or (one[0], 0) == capability == (8, 0)]
    limit = min(SHARED_MEMORY[one] for one in kin)
    found = [f"spills {program.spills} bytes"] if program.spills else []
    found += [f"shared memory {program.shared} over {limit}"] if program.shared > limit else []
    return found + program.unset


@contextmanager
def inside_operators() -> Iterator[None]:
    """Within this block calls on "meta" tensors go through our operators' own code, down to what they launch."""
    with _without_autocast(), _OperatorsInside():
        yield


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


@contextmanager
def _active_device(capability: tuple[int, int]) -> Iterator[None]:
    """Let Triton believe in a device of this capability."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Absent:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

        def get_current_device(self) -> int:
            return -capability[0] * 10 - capability[1]  # compiled programs are kept by device: one for each target

        def get_current_stream(self, device: int) -> int:
            return 0

    before = driver._active
    driver.set_active(Absent())
    try:
        yield
    finally:
        driver._active = before


def _read(name: str, constants: dict[str, Any], made: Any) -> Compiled:
    """Registers, spills and instructions out of the machine code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.cubin"
        path.write_bytes(made.asm["cubin"])
        usage = _cuobjdump("-res-usage", path)
        listing = Listing(_cuobjdump("-sass", path))
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    opcodes = Counter(instruction.word for instruction in listing.instructions)
    return Compiled(name, constants, registers, stack, made.metadata.shared, opcodes, listing.unset_reads)


def _cuobjdump(option: str, path: Path) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(program), option, str(path)], capture_output=True, text=True, check=True).stdout
