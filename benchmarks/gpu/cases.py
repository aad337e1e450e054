"""Cases one after the other: each is answered in the journal, by a record, a failure or why it was left out."""

import math
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.budget import Budget
from benchmarks.journal import Journal
from polysketch.benchmarking.growth import Growth

Labels = dict[str, Any]

_LONGER = 3.0  # times what the last case of a series took, compilation and all, the next may take


class DeviceLost(RuntimeError):
    """Every call on the device fails from here on; another process can go on."""


@dataclass
class Cases:
    """Runs what fits and is not answered yet; a series that failed or becomes slow is not continued at longer lengths.

    Attributes:
        kind: of the records.
        device: where cases run.
        section: its time.
        journal: of the run.
        series: labels -> the series that they are a point of.
        growth: seconds that a call may take, and what calls have taken.
    """

    kind: str
    device: torch.device
    section: Budget
    journal: Journal
    series: Callable[[Labels], Hashable]
    growth: Growth = field(default_factory=lambda: Growth(sys.float_info.max))
    _spent: dict[Hashable, float] = field(default_factory=dict)

    def run(
        self,
        points: Sequence[Labels],
        measure: Callable[[Labels], dict[str, Any]],
        describe: Callable[[dict[str, Any]], str],
    ) -> None:
        """Run the cases.

        Args:
            points: labels of every case.
            measure: labels -> seconds and what else is known of the case.
            describe: a record in a few words.
        """
        for record in (*self.journal.of(self.kind), *self.journal.of("failed")):
            self._note(record)
        for labels in points:
            if self.journal.has(**labels):
                continue
            reason = self._reason_to_skip(labels)
            if reason:
                self.journal.write("skipped", section=self.kind, **labels, reason=reason)
                continue
            started = time.monotonic()
            self.journal.write("begun", section=self.kind, **labels)
            self._note(self._attempt(labels, measure, describe))
            self._spent[self.series(labels)] = time.monotonic() - started

    def _reason_to_skip(self, labels: Labels) -> str | None:
        series = self.series(labels)
        if not self.growth.allows(series, place_of(labels)):
            return "the series ended at a shorter length: it failed or became slow there"
        fits = self.section.fits(_LONGER * self._spent.get(series, 0.5))
        return None if fits else "no time left in this section"

    def _note(self, record: dict[str, Any]) -> None:
        """What the series takes, or that it failed."""
        if self.kind in (record["kind"], record.get("section")):
            self.growth.note(self.series(record), place_of(record), record.get("seconds", math.inf))

    def _attempt(
        self,
        labels: Labels,
        measure: Callable[[Labels], dict[str, Any]],
        describe: Callable[[dict[str, Any]], str],
    ) -> dict[str, Any]:
        """One record, of a time or of a failure."""
        title = ", ".join(f"{name} {value}" for name, value in labels.items())
        try:
            record = self.journal.write(self.kind, **labels, **measure(labels))
        except Exception as error:  # noqa: BLE001 - one broken case must not hide the others
            why = {"error": text_of(error), "out_of_memory": isinstance(error, torch.OutOfMemoryError)}
            record = self.journal.write("failed", section=self.kind, **labels, **why)
            print(f"  {title}: {record['error']}", flush=True)
        else:
            print(f"  {title}: {describe(record)}", flush=True)
        finally:
            release_memory(self.device)
        return record


def place_of(labels: Labels) -> int:
    """The length or position of a case."""
    return labels["length"] if "length" in labels else labels["position"]


def text_of(error: BaseException) -> str:
    """Type and first line, short enough for a table."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def release_memory(device: torch.device) -> None:
    """Give cached memory back, so that one case's blocks are not another's shortage.

    Raises:
        DeviceLost: nothing computes any more, as after an access out of bounds.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLost(f"the device is lost to this process: {text_of(error)}") from error
