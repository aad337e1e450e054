"""Ending a process with everything that it started."""

import contextlib
import os
import signal
import subprocess
from typing import IO, Any


def end_group(process: "subprocess.Popen[Any]") -> None:
    """Kill a process that was started with `start_new_session=True`, and its children; waits for its end."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(file: IO[bytes], count: int = 3) -> str:
    """What a process wrote last, such as its exception, in one line."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 10_000))
    lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-count:])[-600:]
