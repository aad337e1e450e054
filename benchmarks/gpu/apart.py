"""A section of `bench` in a process of its own, which may crash or hang without taking the other sections along.

The process appends to the same journal. Where it ends too early or says nothing for too long, the case that it was at
has failed, and another process goes on with the next one.
"""

from collections.abc import Callable

from benchmarks.budget import Budget
from benchmarks.journal import Journal
from benchmarks.processes import Process

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
        process = Process(command(max(0.0, section.left)), shown=True)
        ending = process.watch(section.deadline + _GRACE, journal.news, _LONGEST_SILENCE)
        reason = f"its process {ending.why}"
        journal.read_again()
        for labels in journal.unanswered():
            journal.write("failed", **labels, error="no answer" if ending.status == 0 else reason, out_of_memory=False)
        if ending.status == 0:
            return
        record = journal.write("crashed", part=name, error=reason)
        print(f"  CRASHED: {record}", flush=True)
        if not section.fits(10.0):
            return
