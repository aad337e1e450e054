"""Launches of the library's Triton programs on tensors of the CPU: compiled for a device, executed by `ptx.executing`.

    with executing((9, 0)):
        ops.linear_attention(query, key, value, backend="triton")

Nothing is assembled: the text of PTX is what runs. What `ptxas` makes of it is not tested here.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from polysketch.ops.triton import availability
from polysketch.ops.triton.configurations import as_if_on
from polysketch.ops.triton.launch import launching
from ptx.executing import execute
from ptx.global_memory import GlobalMemory
from ptx.parsing import Fault, parse

_DEVICES = -100_000
"""Numbers of devices that are not there; Triton keeps compiled programs by the device's number."""
_parsed = cache(parse)


@contextmanager
def executing(capability: tuple[int, int], edit: Callable[[str], str] = str) -> Iterator[Counter[str]]:
    """Within this block launches are executed on the CPU as a device of this compute capability would.

    The counter fills with launches by the program's name. Programs with tensor memory (10.0) are unknown.

    Args:
        capability: what to compile for.
        edit: changes the text of every program, to plant a fault.
    """
    launched: Counter[str] = Counter()

    def launch(kernel: Any, programs: int, arguments: tuple, options: dict) -> None:
        launched[kernel.__name__] += 1
        _launch(kernel, programs, arguments, options, edit)

    with ExitStack() as stack:
        stack.enter_context(_device(capability))
        stack.enter_context(_without_machine_code())
        stack.enter_context(_tensors_of_the_cpu())
        stack.enter_context(as_if_on(capability))
        stack.enter_context(launching(launch))
        yield launched


def _launch(kernel: Any, programs: int, arguments: tuple, options: dict, edit: Callable[[str], str]) -> None:
    made = kernel.warmup(*arguments, grid=(1,), **options)
    program = _parsed(edit(made.asm["ptx"]))
    given = [each for name, each in zip(kernel.arg_names, arguments, strict=False) if _is_passed(made, name)]
    # Behind the kernel's own, Triton passes two pointers to scratch memory, which our programs do not have.
    bits = [_bits(each) for each in given] + [0] * (len(program.parameters) - len(given))
    memory = GlobalMemory()
    for tensor in (each for each in arguments if isinstance(each, torch.Tensor)):
        memory.add(tensor)
    parameters = dict(zip(program.parameters, bits, strict=True))
    try:
        execute(program, programs, 32 * made.metadata.num_warps, parameters, memory, made.metadata.shared)
    except Fault as fault:
        constants = {name: value for name, value in options.items() if isinstance(value, int | str)}
        raise Fault(f"{fault}\nin {programs} programs with {constants}") from None


def _is_passed(made: Any, name: str) -> bool:
    """Whether an argument is a parameter of the compiled program: not None, and no constant."""
    return made.src.signature[name] != "constexpr"


def _bits(argument: Any) -> int:
    """What the parameter holds."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        return struct.unpack("<I", struct.pack("<f", argument))[0]
    return int(argument) & 0xFFFF_FFFF_FFFF_FFFF


@contextmanager
def _device(capability: tuple[int, int]) -> Iterator[None]:
    """Let Triton compile for a device that is not there."""
    number = 10 * capability[0] + capability[1]

    class Absent:
        """As much of a driver as compilation asks for."""

        def get_current_target(self) -> GPUTarget:
            """What to compile for."""
            return GPUTarget("cuda", number, 32)

        def get_current_device(self) -> int:
            """A number that no other test has."""
            return _DEVICES - number

        def get_current_stream(self, device: int) -> int:
            """None."""
            return 0

    before = driver._active
    driver.set_active(Absent())
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def _without_machine_code() -> Iterator[None]:
    """Stop behind PTX, which spares half of the time, and keep what was compiled apart from what was assembled."""

    def stop(_backend: Any, stages: dict, *_rest: Any) -> None:
        stages["cubin"] = lambda _text, _metadata: b""

    before, folder = knobs.runtime.add_stages_inspection_hook, knobs.cache.dir
    knobs.runtime.add_stages_inspection_hook = stop
    knobs.cache.dir = str(Path(folder) / "without-machine-code")
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook, knobs.cache.dir = before, folder


@contextmanager
def _tensors_of_the_cpu() -> Iterator[None]:
    """Let every op's programs take them, wherever `why_not` was kept: under any of its names it answers None."""
    asked = availability.why_not
    before = asked.__code__
    asked.__code__ = (lambda tensor: None).__code__
    try:
        yield
    finally:
        asked.__code__ = before
