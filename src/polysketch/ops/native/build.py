"""Compile `source/*.cpp` into one shared library, once for each machine, compiler and version of the source.

The sources are plain C++17 with the vector extensions of GCC and Clang: no header of PyTorch's or Python's, so that
compiling takes seconds and the result fits any version of either.
"""

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch

from polysketch.ops.compiling import asked_once
from polysketch.ops.native.trusted import find_trusted, named_by_content, why_folder_untrusted

_SOURCE = Path(__file__).parent / "source"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-shared", "-fPIC", "-w")
# Flags instead of -march=native: folders of compiled files are shared between unlike machines.
_VECTOR_FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}
_SECONDS = 300


@cache
def library() -> ctypes.CDLL:
    """The compiled programs; compiled now if they are not there, which takes about five seconds.

    They are kept in `polysketch/native` under $XDG_CACHE_HOME or ~/.cache. Where others can write to that folder, and
    where it cannot be written, they are compiled for this process alone.

    Raises:
        RuntimeError: they cannot be compiled or loaded here, with the reason.
    """
    reason = why_unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    return ctypes.CDLL(str(compiled(_SOURCE, _folder())))


@asked_once  # torch.compile does not trace into subprocesses
def why_unavailable() -> str | None:
    """Why the native programs cannot run here; None where they can.

    The first question compiles them. It warns, once, where there is a compiler and what it makes cannot be used: the
    backends in their place take several times as long.
    """
    if not _found:
        _found.append(_reason())
        if _found[0] is not None and _has_compiler():
            warnings.warn(f"{_found[0]}; plain PyTorch, which is slower, takes their place", stacklevel=2)
    return _found[0]


_found: list[str | None] = []


def fingerprint() -> str:
    """What tells the compiled programs from others: their sha256, 12 digits of it; "none" where they cannot run.

    Other programs, or none, give results that differ by rounding.
    """
    return "none" if why_unavailable() is not None else compiled(_SOURCE, _folder()).stem.rpartition("-")[2][:12]


def _reason() -> str | None:
    try:
        ctypes.CDLL(str(compiled(_SOURCE, _folder())))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"the native programs cannot run here: {error}"
    return None


def compiled(source: Path, folder: Path) -> Path:
    """The shared library of the programs in `source`, compiled into `folder` unless it is there, whole and ours.

    Raises:
        RuntimeError: no compiler, or it refused the programs.
        subprocess.TimeoutExpired: it took minutes.
    """
    compiler = _compiler()
    flags = [*_FLAGS, *_VECTOR_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ())]
    stem = _digest(source, compiler, flags)
    return find_trusted(folder, stem) or _compile(source, compiler, flags, folder, stem)


def _has_compiler() -> bool:
    try:
        return bool(_compiler())
    except RuntimeError:
        return False


def _compiler() -> str:
    """The C++ compiler: $CXX, or the first of the usual names that is there."""
    for name in filter(None, (os.environ.get("CXX"), *_COMPILERS)):
        found = shutil.which(name)
        if found:
            return found
    raise RuntimeError(f"no C++ compiler: none of {', '.join(_COMPILERS)} is on the path, and CXX names none")


def _compile(source: Path, compiler: str, flags: list[str], folder: Path, stem: str) -> Path:
    """Compile beside its place and move the result there: another process may be doing the same."""
    sources = sorted(str(path) for path in source.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / f"{stem}.so"
        command = [compiler, *flags, *sources, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if done.returncode:
            raise RuntimeError(f"{compiler} failed: {_first_error(done.stderr)}")
        target = folder / named_by_content(stem, made.read_bytes())
        made.chmod(0o700)  # whatever the user's mask: others must not write to what is loaded
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        made.replace(target)
    return target


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")


def _digest(source: Path, compiler: str, flags: list[str]) -> str:
    """Names everything that the compiled file depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    digest = hashlib.sha256(repr((platform.system(), platform.machine(), flags, version.stdout)).encode())
    for path in sorted(source.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _folder() -> Path:
    """Where compiled files are kept: the user's cache, or a temporary folder where that cannot be used."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "polysketch" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.lstat().st_uid == _user():
            folder.chmod(0o700)
        with tempfile.TemporaryFile(dir=folder):
            reason = why_folder_untrusted(folder)
    except OSError as error:
        return _temporary_folder(str(error))
    return folder if reason is None else _temporary_folder(reason)


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


@cache
def _temporary_folder(reason: str) -> Path:
    """One for the process: in another one everything would be compiled again."""
    warnings.warn(
        f"the native programs are compiled for this process alone, which takes seconds: {reason}; let XDG_CACHE_HOME "
        "be a folder of your own",
        stacklevel=2,
    )
    folder = Path(tempfile.mkdtemp(prefix="polysketch-native-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
