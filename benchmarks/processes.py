"""Processes that are watched, and ended with everything that they started when they take too long or fall silent."""

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks import ROOT


class Ending(NamedTuple):
    """How a process ended.

    Attributes:
        status: its exit status; None where it was ended from here.
        reason: the same in words.
        lines: what it wrote.
    """

    status: int | None
    reason: str
    lines: list[str]

    @property
    def why(self) -> str:
        """The reason, and what it wrote last, such as its exception, in one line."""
        said = " | ".join([line.strip() for line in self.lines if line.strip()][-6:])[-600:]
        return f"{self.reason}: {said or 'it wrote nothing'}"


class Process:
    """A process in the root of the clone; what it writes goes into a file.

    Args:
        command: what to run.
        shown: whether its output is shown as it comes; else it goes into the file, as errors do.
        environment: variables besides those of this process.
    """

    def __init__(self, command: Sequence[str], *, shown: bool = False, **environment: str) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would stop the process
        output = None if shown else self._file
        environment = {**os.environ, **environment}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=self._file, start_new_session=True
        )

    def watch(
        self, deadline: float, heard: Callable[[], object] = lambda: None, longest_silence: float = math.inf
    ) -> Ending:
        """Wait for its end, or end it.

        Args:
            deadline: on the monotonic clock.
            heard: is asked again and again, and a last time at the end; true where the process has said something new.
            longest_silence: seconds without that.
        """
        reason, last = "", time.monotonic()
        try:
            while not reason and self._process.poll() is None:
                time.sleep(0.2)
                now = time.monotonic()
                last = now if heard() else last
                if now > deadline:
                    reason = "was ended: it took too long"
                elif now - last > longest_silence:
                    reason = f"said nothing for {longest_silence:.0f} s"
        finally:
            status = self._process.poll()
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        heard()
        with self._file:
            self._file.seek(0)
            lines = self._file.read().decode(errors="replace").splitlines()
        return Ending(status, reason if status is None else f"ended with status {status}", lines)
