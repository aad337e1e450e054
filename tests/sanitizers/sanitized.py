"""Python whose native programs are compiled by GCC with sanitizers; Python, PyTorch and their threads are as ever.

The sanitizer's library is loaded before everything else, so that it sees every allocation, lock and thread: an access
beyond a tensor of PyTorch's is found, and what Python's locks order is no race. It sees accesses of our programs alone.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CAUGHT = 98
"""Exit status of a process in which a sanitizer found something."""

FLAGS = {
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
    "thread": "-fsanitize=thread",
}
_LIBRARIES = {"address": "libasan.so", "thread": "libtsan.so"}

# OpenMP's threads, which are PyTorch's, wait for one another by means that ThreadSanitizer does not see: of them there
# is one, whatever `torch.set_num_threads` says. The workers of this library are Python's threads.
# Leaks: Python and PyTorch keep thousands of allocations until the end, and ours are freed by their owner, `Buffer`.
# Signals: Python's handler notes a signal and allocates nothing of ours; what it calls is not our program.
_OPTIONS = {
    "ASAN_OPTIONS": f"detect_leaks=0:exitcode={CAUGHT}",
    "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={CAUGHT}",
    "TSAN_OPTIONS": f"report_signal_unsafe=0:exitcode={CAUGHT}",
    "OMP_THREAD_LIMIT": "1",
}
_COMPILED_FROM = """
import sys
from pathlib import Path
from polysketch.ops.native import build, compiler
build.SECONDS = compiler.SECONDS = 3600  # sanitizers take the compiler several times as long
source, folder = (Path(one) if one else None for one in sys.argv[1:])
print(build.compiled(source or build._SOURCE, folder or build._folder()))
"""


def why_none() -> str | None:
    """Why there are no sanitizers here; None where there are."""
    try:
        missing = [name for name in _LIBRARIES.values() if not Path(_path_of(name)).is_absolute()]
    except FileNotFoundError:
        return "needs g++"
    return f"needs {', '.join(missing)} of GCC" if missing else None


def _path_of(library: str) -> str:
    asked = ["g++", f"-print-file-name={library}"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def environment(sanitizer: str) -> dict[str, str]:
    """What makes the package compile with a sanitizer, into a cache of its own below `build`."""
    folder = ROOT / "build" / "sanitizers" / sanitizer
    folder.mkdir(parents=True, exist_ok=True)
    compiler = folder / "c++"
    compiler.write_text(
        f'#!/bin/sh\nunset LD_PRELOAD\nexec g++ "$@" -O1 -g -fno-omit-frame-pointer {FLAGS[sanitizer]}\n'
    )
    compiler.chmod(0o700)
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
    return {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(folder), "PYTHONPATH": path, **_OPTIONS}


def compiled(sanitizer: str, source: Path | None = None, folder: Path | None = None) -> Path:
    """The programs of a source, or all of ours, compiled unless they are there."""
    command = [sys.executable, "-c", _COMPILED_FROM, str(source or ""), str(folder or "")]
    made = subprocess.run(command, env=environment(sanitizer), stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.strip())


def run(sanitizer: str, *arguments: str, more: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Python with these arguments and a sanitizer.

    Args:
        sanitizer: of `FLAGS`.
        arguments: of Python.
        more: environment.
    """
    preloaded = f"{_path_of(_LIBRARIES[sanitizer])} {_path_of('libstdc++.so.6')}"  # which throws through the sanitizer
    values = {**environment(sanitizer), "LD_PRELOAD": preloaded, **(more or {})}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=values, cwd=ROOT, capture_output=True, text=True, check=False)
