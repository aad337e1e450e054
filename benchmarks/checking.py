"""`gpu_check check`: the tests of every device, by pytest in a process of their own, watched from here."""

import importlib.util
import os
import sys
import time

from benchmarks.budget import Budget
from benchmarks.journal import Journal
from benchmarks.processes import Process

FOLDERS = ("tests/device",)
_MOST_PROCESSES = 12
_LONGEST_TEST = 120  # seconds, where pytest-timeout is installed
_GRACE = 20.0  # seconds beyond the section's end, for tests begun before it
_QUICK = 11  # every so many tests: no multiple of the number of dtypes
_ENDED = (0, 1, 5)  # exit statuses of a run that came to its end: passed, some failed, there were none


def why_not() -> str | None:
    """Why nothing can be checked here; None where it can."""
    return None if _installed("pytest") else "gpu_check check runs the tests: expected pytest, which is not installed"


def run_tests(
    device: str, section: Budget, journal: Journal, *, processes: int | None, quick: bool, match: str | None = None
) -> None:
    """Run the tests of a device until they or the section end; each one's record is in the journal.

    Args:
        device: "cpu" or "cuda".
        processes: at once, where pytest-xdist is installed; one that crashes fails its test, and another takes its
            place. Default: on a GPU one for each core but two, at most 12.
        quick: some of the tests alone.
        match: an expression of pytest's -k; the tests that it picks alone.
    """
    command = [*_command(device, processes, quick=quick, match=match), f"--records={journal.path.resolve()}"]
    command.append(f"--deadline={time.time() + section.left}")
    ending = Process(command, shown=True).watch(section.deadline + _GRACE)
    journal.read_again()
    if ending.status not in _ENDED:
        journal.write("crashed", part="checks", error=f"pytest {ending.why}")


def _command(device: str, processes: int | None, *, quick: bool, match: str | None) -> list[str]:
    """What runs the tests, with the plugins that are here; warnings of other versions are no errors."""
    wanted = f"{device} and ({match})" if match else device
    command = [sys.executable, "-m", "pytest", *FOLDERS, "-m", "device", "-k", wanted, "--tb=short", "-q"]
    command += ["-o", "addopts=--import-mode=importlib", "-W", "ignore", "-p", "no:cacheprovider"]
    command += ["-p", "benchmarks.recording", *([f"--every={_QUICK}"] if quick else [])]
    count = _processes(device) if processes is None else processes
    if count and _installed("xdist"):
        command += ["-n", str(count), "--max-worker-restart", "20"]
    if _installed("pytest_timeout"):
        # Of a thread: it ends the process of a program that hangs, which a signal does not interrupt.
        command += [f"--timeout={_LONGEST_TEST}", *(["--timeout-method=thread"] if device == "cuda" else [])]
    return command


def _processes(device: str) -> int:
    return 0 if device == "cpu" else max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) - 2))


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
