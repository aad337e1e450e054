"""The programs of `source/*.cpp` as one shared library: of the wheel where it brings one that fits, or compiled here.

They are compiled once for each machine, compiler and version of the source, and kept.
"""

import atexit
import ctypes
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
from polysketch.ops.native.compiler import FLAGS, SECONDS, VECTOR_FLAGS, compile_programs, digest_of, find_compiler
from polysketch.ops.native.shipped import find_shipped
from polysketch.ops.native.trusted import find_trusted, why_folder_untrusted
from polysketch.user_cache import user_cache

_SOURCE = Path(__file__).parent / "source"


@cache
def library() -> ctypes.CDLL:
    """The compiled programs; those of the wheel, or compiled now if they are not there, which takes 28 to 49
    seconds on two cores.

    What is compiled is kept in `polysketch/native` under $XDG_CACHE_HOME or ~/.cache. Where others can write to that
    folder, and where it cannot be written, it is for this process alone.

    Raises:
        RuntimeError: they cannot be compiled or loaded here, with the reason.
    """
    reason = why_unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    return ctypes.CDLL(str(_file()))


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
    return "none" if why_unavailable() is not None else _file().stem.rpartition("-")[2][:12]


def _reason() -> str | None:
    try:
        ctypes.CDLL(str(_file()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"the native programs cannot run here: {error}"
    return None


def _file() -> Path:
    shipped = find_shipped(_SOURCE, torch.backends.cpu.get_cpu_capability())
    return shipped or compiled(_SOURCE, _folder())


def compiled(source: Path, folder: Path) -> Path:
    """The shared library of the programs in `source`, compiled into `folder` unless it is there, whole and ours.

    Raises:
        RuntimeError: no compiler, or it refused the programs.
        subprocess.TimeoutExpired: it took minutes.
    """
    compiler = find_compiler()
    flags = (*FLAGS, *VECTOR_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ()))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=SECONDS, check=False)
    stem = digest_of(source, platform.system(), platform.machine(), flags, version.stdout)
    return find_trusted(folder, stem) or compile_programs(source, compiler, flags, folder, stem)


def _has_compiler() -> bool:
    try:
        return bool(find_compiler())
    except RuntimeError:
        return False


def _folder() -> Path:
    """Where compiled files are kept: the user's cache, or a temporary folder where that cannot be used."""
    folder = user_cache() / "native"
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
        f"the native programs are compiled for this process alone, which takes half a minute or more: {reason}; let "
        "XDG_CACHE_HOME be a folder of your own",
        stacklevel=2,
    )
    folder = Path(tempfile.mkdtemp(prefix="polysketch-native-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
