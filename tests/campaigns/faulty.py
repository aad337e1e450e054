"""The command `polysketch` with a fault in it: `python faulty.py FAULT serve ...`."""

import sys

from polysketch.cli import main
from polysketch.generation.slots import Slots
from polysketch.generation.state_tensors import growing_parts
from polysketch.serving.worker import Worker

KEPT = []


def leak() -> None:
    """A little of every request stays."""
    close = Worker._close

    def closing(self, reason, job):
        KEPT.append(b"x" * 1_000_000)
        close(self, reason, job)

    Worker._close = closing


def slot() -> None:
    """The last request's sums do not move into the slot that is free."""

    def free(self, slot):
        last = len(self) - 1
        self._settle()
        for rows in growing_parts(self._all).values():
            rows.rows[slot] = rows.rows[last]
            rows.rows.pop()
        self._used = self._first(last)

    Slots.free = free


def raises() -> None:
    """An exception that nobody catches, now and then."""
    submit = Worker.submit

    def submitting(self, requests):
        if len(requests[0][0].prompt) % 7 == 0:
            raise KeyError("planted")
        return submit(self, requests)

    Worker.submit = submitting


{"leak": leak, "slot": slot, "raises": raises}[sys.argv.pop(1)]()
sys.exit(main())
