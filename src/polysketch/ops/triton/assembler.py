"""Which assembler makes machine code of the programs.

ptxas of CUDA 12.8 miscompiles some of them for sm_90. Triton 3.4 to 3.7 bring it for devices before Blackwell. Where
two matrix products of a loop read shared memory from the same address, it makes addresses of the second out of a
register that nothing has written: results are wrong, or the process ends in an illegal memory access. ptxas of CUDA
12.9 does not, and for Blackwell Triton brings that or a later one, which makes code for older devices too.
"""

import os
from functools import cache
from typing import Any

import torch

FIRST_RIGHT = (12, 9)
"""Release of CUDA from which ptxas compiles the programs rightly; 12.8 does not, 12.9, 13.1 and 13.5 do."""
BLACKWELL = (10, 0)
"""Compute capability from which Triton takes its newer assembler by itself."""
VARIABLE = "TRITON_PTXAS_PATH"
"""Of the environment: Triton takes this ptxas instead of its own."""


def prepare(capability: tuple[int, int]) -> str | None:
    """Have Triton take an assembler that compiles the programs rightly; why it cannot, or None.

    What is chosen holds for all of Triton's programs in this process and in those that it starts: Triton has one choice
    for all. An assembler that the user has named is never replaced.

    Args:
        capability: compute capability of the device.

    Cost: two calls of ptxas, once in a process.
    """
    return None if capability >= BLACKWELL else _prepare()


def version(capability: tuple[int, int]) -> str:
    """Release of CUDA that the assembler in use for a device belongs to, as "12.9"."""
    from triton import knobs

    return (knobs.nvidia.ptxas_blackwell if capability >= BLACKWELL else knobs.nvidia.ptxas).version


@cache
def _prepare() -> str | None:
    from triton import knobs

    found = knobs.nvidia.ptxas
    if _release(found) >= FIRST_RIGHT:
        return None
    wrong = f"ptxas of CUDA {found.version} miscompiles programs of the triton backend"
    if os.environ.get(VARIABLE):
        return f"{wrong}, and {VARIABLE} names it: unset that, or name a ptxas of CUDA 12.9 or later"
    newer = getattr(knobs.nvidia, "ptxas_blackwell", None)
    if newer is None or _release(newer) < FIRST_RIGHT or not _fits_driver(newer):
        return f"{wrong}, and this Triton brings no other that fits: name one of CUDA 12.9 in {VARIABLE}"
    knobs.nvidia.ptxas = newer.path
    return None


def _release(tool: Any) -> tuple[int, ...]:
    """(12, 9) of "12.9"."""
    return tuple(int(part) for part in tool.version.split("."))


def _fits_driver(tool: Any) -> bool:
    """Whether a driver that runs this PyTorch loads what the assembler makes: not if that is of a later CUDA."""
    runtime = torch.version.cuda
    return runtime is None or _release(tool)[0] <= int(runtime.partition(".")[0])
