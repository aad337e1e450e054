"""Call a C++ compiler on `source/*.cpp`. The standard library alone: the build of a wheel loads this file by its path.

The sources are plain C++17 with the vector extensions of GCC and Clang: no header of PyTorch's or Python's, so that
compiling takes seconds and the result fits any version of either.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-shared", "-fPIC", "-w")
# Flags instead of -march=native: folders of compiled files are shared between unlike machines. Without its "-m" each is
# the name of an instruction set in /proc/cpuinfo.
VECTOR_FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
# For each kind of processor the least that every one has, since compilers of some distributions are set to more.
_LEAST = {"x86_64": "-march=x86-64", "aarch64": "-march=armv8-a"}
_SETS = {"x86_64": ("DEFAULT", *VECTOR_FLAGS), "aarch64": ("DEFAULT",)}
_COMPILERS = ("c++", "g++", "clang++")
SECONDS = 300


def find_compiler() -> str:
    """The C++ compiler: $CXX, or the first of the usual names that is there.

    Raises:
        RuntimeError: there is none.
    """
    for name in filter(None, (os.environ.get("CXX"), *_COMPILERS)):
        found = shutil.which(name)
        if found:
            return found
    raise RuntimeError(f"no C++ compiler: none of {', '.join(_COMPILERS)} is on the path, and CXX names none")


def compile_programs(source: Path, compiler: str, flags: Sequence[str], folder: Path, stem: str) -> Path:
    """Compile beside its place and move the result there: another process may be doing the same.

    Raises:
        RuntimeError: the compiler refused the programs.
        subprocess.TimeoutExpired: a file took minutes.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / f"{stem}.so"
        objects = {path: Path(temporary) / f"{path.stem}.o" for path in sorted(source.glob("*.cpp"))}
        _run_together([[compiler, *flags, "-c", str(path), "-o", str(to)] for path, to in objects.items()])
        _run_together([[compiler, *flags, *map(str, objects.values()), "-o", str(made)]])
        target = folder / named_by_content(stem, made.read_bytes())
        made.chmod(0o700)  # whatever the user's mask: others must not write to what is loaded
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        made.replace(target)
    return target


def _run_together(commands: Sequence[Sequence[str]]) -> None:
    """Run commands of a compiler, as many at once as there are cores for this process; the first to fail ends all.

    Raises:
        RuntimeError: one failed, with its first error.
        subprocess.TimeoutExpired: one took minutes.
    """
    waiting, running = list(reversed(commands)), deque[subprocess.Popen[str]]()
    try:
        while waiting or running:
            while waiting and len(running) < _cores():
                running.append(_started(waiting.pop()))
            _, errors = running[0].communicate(timeout=SECONDS)
            if running.popleft().returncode:
                raise RuntimeError(f"{commands[0][0]} failed: {_first_error(errors)}")
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _started(command: Sequence[str]) -> "subprocess.Popen[str]":
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, text=True, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_for_wheel(source: Path, folder: Path, instructions: str | None = None) -> list[Path]:
    """Compile the programs for every instruction set of this kind of processor, into files that a wheel can bring.

    Args:
        source: folder of the programs.
        folder: of the files.
        instructions: one set alone, in PyTorch's words: "AVX2", "AVX512"; any other is the least.

    Raises:
        RuntimeError: no compiler, one that refuses, or a kind of processor that wheels bring nothing for.
    """
    machine = platform.machine()
    if machine not in _SETS:
        raise RuntimeError(f"wheels bring programs for {', '.join(_SETS)}; this machine is {machine}")
    compiler = find_compiler()
    one = instructions if instructions in VECTOR_FLAGS else "DEFAULT"
    return [
        compile_programs(source, compiler, _wheel_flags(name), folder, wheel_stem(source, name))
        for name in (_SETS[machine] if instructions is None else (one,))
    ]


def wheel_stem(source: Path, instructions: str) -> str:
    """Where the name of a file of a wheel begins: the instruction set, and a digest of source, flags and machine.

    Args:
        source: folder of the programs.
        instructions: a key of `VECTOR_FLAGS`, or "DEFAULT".
    """
    digest = digest_of(source, platform.system(), platform.machine(), _wheel_flags(instructions))
    return f"programs-{instructions.lower()}-{digest}"


def _wheel_flags(instructions: str) -> tuple[str, ...]:
    return (*FLAGS, _LEAST.get(platform.machine(), ""), *VECTOR_FLAGS.get(instructions, ()))


def named_by_content(stem: str, content: bytes) -> str:
    """The file name of a library; it holds the sha256 of the content, so that one rename publishes both."""
    return f"{stem}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def digest_of(source: Path, *others: object) -> str:
    """32 digits that name what is compiled: every file of the folder, and whatever else the result depends on."""
    digest = hashlib.sha256(repr(others).encode())
    for path in sorted(source.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")
