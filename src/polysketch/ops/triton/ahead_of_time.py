"""Compile the programs of a call for a device that is not there, and read what the compiler made of them.

A call runs on tensors of the "meta" device, which have shapes and no memory; each launch is compiled as it stands, for
the compute capability asked for, by the compiler that Triton brings.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from polysketch.ops.triton.configurations import as_if_on
from polysketch.ops.triton.launch import launching

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
    """

    name: str
    constants: dict[str, Any]
    registers: int
    spills: int
    shared: int
    opcodes: Counter[str]

    @property
    def tensor_core(self) -> int:
        """Tensor-core instructions in the listing."""
        return sum(count for name, count in self.opcodes.items() if name in _TENSOR_CORE)


@contextmanager
def compiling(capability: tuple[int, int]) -> Iterator[list[Compiled]]:
    """Within this block launches are compiled, not run; the list fills with what came out.

    Raises:
        RuntimeError: Triton's interpreter is on, which compiles nothing.
    """
    from polysketch.ops.triton.availability import interpreting

    if interpreting():
        raise RuntimeError("nothing is compiled under Triton's interpreter; unset TRITON_INTERPRET")
    found: list[Compiled] = []

    def compile_launch(kernel: Any, programs: int, arguments: tuple, options: dict) -> None:
        made = kernel.warmup(*arguments, grid=(1,), **options)
        found.append(_read(kernel.__name__, options, made))

    with _active_device(capability), as_if_on(capability), launching(compile_launch):
        yield found


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
        listing = _cuobjdump("-sass", path)
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    opcodes = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", listing, re.MULTILINE))
    return Compiled(name, constants, registers, stack, made.metadata.shared, opcodes)


def _cuobjdump(option: str, path: Path) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(program), option, str(path)], capture_output=True, text=True, check=True).stdout
