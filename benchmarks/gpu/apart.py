"""A section of `bench` in a process of its own, which may crash or hang without taking the other sections along.

The process appends to the same journal. Where it ends too early or says nothing for too long, the case that it was at
has failed, and another process goes on with the next one.
"""

import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from benchmarks import ROOT
from benchmarks.budget import Budget
from benchmarks.journal import Journal
from benchmarks.processes import end_group, last_lines

_MOST_STARTS = 4
_GRACE = 12.0  # seconds beyond the section's end: its process counts from when it has been loaded
_LONGEST_SILENCE = 75.0  # seconds without a line in the journal: a start, or programs that are compiled first


def run_apart(name: str, command: Callable[[float], list[str]], section: Budget, journal: Journal) -> None:
    """Run a section to its end, in as many processes as that takes, at most 4.

    Args:
        name: of the section.
        command: seconds that are left -> what starts the process.
        section: its time.
        journal: has everything the processes wrote on return.
    """
    for _ in range(_MOST_STARTS):
        reason = _run_once(command(max(0.0, section.left)), section, journal.path)
        journal.read_again()
        for labels in journal.unanswered():
            journal.write("failed", **labels, error=reason or "no answer", out_of_memory=False)
        if reason is None:
            return
        record = journal.write("crashed", part=name, error=reason)
        print(f"  CRASHED: {record}", flush=True)
        if not section.fits(10.0):
            return


def _run_once(command: list[str], section: Budget, path: Path) -> str | None:
    """Why the process did not come to its end; None where it did."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, cwd=ROOT, stderr=errors, start_new_session=True)
        try:
            reason = _watch(process, section, path)
        finally:
            end_group(process)
        return reason and f"{reason} {_said(errors)}".rstrip()


def _watch(process: "subprocess.Popen[bytes]", section: Budget, path: Path) -> str | None:
    size, heard = 0, time.monotonic()
    while True:
        try:
            status = process.wait(0.2)
        except subprocess.TimeoutExpired:
            pass
        else:
            return None if status == 0 else f"its process ended with status {status}"
        now, grown = time.monotonic(), path.stat().st_size
        if grown != size:
            size, heard = grown, now
        if now > section.deadline + _GRACE:
            return "its process was not done in the section's time"
        if now - heard > _LONGEST_SILENCE:
            return f"its process said nothing for {_LONGEST_SILENCE:.0f} s"


def _said(errors: IO[bytes]) -> str:
    said = last_lines(errors)
    return f"({said})" if said else ""
