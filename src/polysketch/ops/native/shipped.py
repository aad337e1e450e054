"""Programs that a wheel brings: compiled where the wheel was built, one file for each instruction set, beside this one.

A file is taken where its name says that it fits: operating system, kind of processor, flags, and the digest of the very
source that lies in the package. The processor has to have every instruction that the flags allow. A file is trusted as
far as the package's code beside it is, and no further. Anything else is as if no file were there.
"""

import ctypes
from pathlib import Path

from polysketch.ops.native.compiler import VECTOR_FLAGS, named_by_content, wheel_stem
from polysketch.ops.native.trusted import why_untrusted_beside

_CODE = Path(__file__)
_PROCESSOR = Path("/proc/cpuinfo")


def find_shipped(source: Path, instructions: str) -> Path | None:
    """The file of a wheel for this source, this machine and these instructions; None where there is none that fits.

    Args:
        source: folder of the programs.
        instructions: what PyTorch uses here, in its words: "AVX2", "AVX512"; any other is the least of this processor.
    """
    instructions = instructions if instructions in VECTOR_FLAGS else "DEFAULT"
    if not _processor_has(instructions):
        return None
    stem = wheel_stem(source, instructions)
    candidates = sorted(_CODE.parent.glob(f"{stem}-*.so"))
    return next((path for path in candidates if _is_whole(path, stem) and _loads(path)), None)


def _processor_has(instructions: str) -> bool:
    """Whether Linux lists what the flags allow: PyTorch can be told of more (ATEN_CPU_CAPABILITY) than there is."""
    needed = {flag.removeprefix("-m") for flag in VECTOR_FLAGS.get(instructions, ())}
    return not needed or needed <= _listed()


def _listed() -> set[str]:
    try:
        lines = _PROCESSOR.read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _is_whole(path: Path, stem: str) -> bool:
    """Whether it is nobody else's, and holds what its name says."""
    return why_untrusted_beside(path, _CODE) is None and path.name == named_by_content(stem, path.read_bytes())


def _loads(path: Path) -> bool:
    """Whether it can be loaded: a wheel may have been unpacked where the C library is older than it needs."""
    try:
        ctypes.CDLL(str(path))
    except OSError:
        return False
    return True
