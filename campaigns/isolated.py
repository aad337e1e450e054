"""A call in a process of its own, with a bound of time and of memory; and what is taken for a good end.

The process is a fork: what was imported before the campaign is there, so that a call costs milliseconds. It may hang,
crash, run out of memory or leave the terminal's state behind without any harm to the campaign.
"""

import contextlib
import io
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from campaigns.harness import REFUSALS
from polysketch.cli.terminal import visible

MEMORY = 3 << 30
"""Bytes of address space that a call may take beyond what the campaign itself has."""

_INNARDS = re.compile(
    r"'?NoneType'? object|has no attribute|unsupported operand|index out of range|not subscriptable|not iterable"
    r"|unexpected keyword argument|required positional argument|maximum recursion depth|invalid literal for int"
    r"|could not convert string|unhashable type|not supported between|object cannot be interpreted|embedded null"
    r"|must be real number|codec can't|not enough values to unpack|too many values to unpack|indices must be"
    r"|object is not callable|Exceeds the limit \(|cannot convert float|has no len\(\)|bad operand type"
    r"|division by zero|cannot mmap|negative seek|\bINTERNAL ASSERT|numpy\.|argument of type"
    r"|Expecting value|Expecting property name|Expecting ',' delim|Extra data: line|Unterminated string|Invalid control"
)
"""What Python and its libraries say of a mistake in a program, where nothing of ours says what was expected."""


@dataclass(frozen=True)
class Ended:
    """How a call ended.

    Attributes:
        status: what the call gave, or below zero the signal that ended it.
        text: what it wrote on standard error.
        output: what it wrote on standard output.
        peak: bytes of memory that it held at most, those shared with the campaign among them.
    """

    status: int
    text: str
    output: str
    peak: int

    @property
    def is_hang(self) -> bool:
        """Whether its time was over."""
        return self.status == -signal.SIGALRM


def isolated(work: Callable[[], Any], *, seconds: int = 60, memory: int = MEMORY, terminal: bool = False) -> Ended:
    """Call `work` in a fork of this process.

    Args:
        work: gives an exit status, or anything else for 0.
        seconds: until it is ended.
        memory: bytes of address space beyond what this process has.
        terminal: whether it believes that its output goes to a terminal.
    """
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+b") as errors, tempfile.TemporaryFile("w+b") as output:
        child = os.fork()
        if child == 0:
            _work_and_exit(work, seconds, memory, errors.fileno(), output.fileno(), terminal=terminal)
        _, status, used = os.wait4(child, 0)
        texts = []
        for file in (errors, output):
            file.seek(0)
            texts.append(file.read(1 << 20).decode(errors="replace"))
    return Ended(os.waitstatus_to_exitcode(status), texts[0], texts[1], used.ru_maxrss * 1024)


def _work_and_exit(
    work: Callable[[], Any], seconds: int, memory: int, errors: int, output: int, *, terminal: bool
) -> None:
    status = 99
    try:
        limit = address_space() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        if terminal:
            sys.stdout.isatty = sys.stderr.isatty = lambda: True  # type: ignore[method-assign]
        warnings.resetwarnings()  # whoever runs the campaign may have made them errors
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        given = work()
        status = given if isinstance(given, int) and not isinstance(given, bool) else 0
    except BaseException:  # noqa: BLE001  (whatever it is, it is what the campaign looks for)
        with contextlib.suppress(BaseException):
            traceback.print_exc(file=sys.stderr)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status if 0 <= status <= 255 else 99)  # with another one, this fork would go on as the campaign


def address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def refusing(work: Callable[[], Any]) -> Callable[[], int]:
    """The same call, that says a refusal as a command does: one line and status 1; what is none goes on as it is."""

    def refused() -> int:
        try:
            work()
        except Exception as error:
            if not isinstance(error, REFUSALS) and type(error).__name__ != "SafetensorError":
                raise
            print(visible(f"polysketch: {type(error).__name__}: {' '.join(str(error).split())}"), file=sys.stderr)
            return 1
        return 0

    return refused


def in_this_process(work: Callable[[], Any]) -> tuple[Ended, BaseException | None]:
    """Call `work` here, without bounds: how `refusing(work)` would have ended a process, and the error behind that."""
    errors: list[BaseException] = []

    def heard() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            raise

    status, said = 99, io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = refusing(heard)()
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001  (whatever it is, it is what the campaign looks for)
            traceback.print_exc()
    return Ended(status, said.getvalue(), "", 0), errors[0] if errors else None


def complaint(ended: Ended, *, may_go_on: bool = False) -> str | None:
    """What is wrong with how a call ended; None where nothing is.

    Args:
        ended: the end.
        may_go_on: whether it was asked for work without end.
    """
    if ended.is_hang:
        return None if may_go_on else "hangs"
    if ended.status not in (0, 1, 2) or "Traceback" in ended.text:
        return f"ended with status {ended.status}: {_last(ended.text)}"
    lines = [line for line in ended.text.splitlines() if line.startswith("polysketch: ")]
    if (ended.status == 1 and len(lines) != 1) or (ended.status and not ended.text.strip()):
        return f"status {ended.status} without one line that says why: {_last(ended.text)}"
    if ended.status == 1 and "expected" not in lines[0] and _INNARDS.search(lines[0]):
        return f"says no more than Python does: {lines[0][:300]}"
    return None


def _last(text: str) -> str:
    """The end of a traceback, with where it came from."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    places = [line for line in lines if line.startswith("File ") and "polysketch" in line]
    return " | ".join([*places[-1:], *lines[-1:]])[-400:]
