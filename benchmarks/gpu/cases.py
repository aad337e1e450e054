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
from polysketch.benchmarking.timing import Clock, Rates

Labels = dict[str, Any]

_ASSUMED = Rates(989e12, 4.8e12)
_LONGER = 3.0  # times what the last case of a series took, compilation and all, the next may take


class DeviceLost(RuntimeError):
    """Every call on the device fails from here on; another process can go on."""


@dataclass(frozen=True)
class Bench:
    """What a section is given.

    Attributes:
        clock: of the device.
        section: its time.
        journal: of the run.
        quick: tiny sizes.
        match: parts of the names of series or models that are wanted; none for all.
    """

    clock: Clock
    section: Budget
    journal: Journal
    quick: bool
    match: Sequence[str] = ()

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return self.clock.device

    @property
    def rates(self) -> Rates:
        """What the device does at best, as this run measured it; else what is known of an H200."""
        measured = next(iter(self.journal.of("rates")), None)
        return Rates(measured["bfloat16"], measured["copy_bytes_per_second"]) if measured else _ASSUMED


@dataclass
class Cases:
    """Runs what fits and is not answered yet; a series that failed or becomes slow is not continued at longer lengths.

    Attributes:
        kind: of the records.
        bench: the section's.
        series: labels -> the series that they are a point of.
        measure: labels -> seconds, tokens_per_second, floor_seconds and what else is known of the case.
        longest_call: seconds that a call may take.
    """

    kind: str
    bench: Bench
    series: Callable[[Labels], Hashable]
    measure: Callable[[Labels], dict[str, Any]]
    longest_call: float = sys.float_info.max
    _spent: dict[Hashable, float] = field(default_factory=dict)

    def run(self, points: Sequence[Labels]) -> None:
        """Run the cases with these labels."""
        journal, growth = self.bench.journal, Growth(self.longest_call)
        for record in (*journal.of(self.kind), *journal.of("failed")):
            self._note(record, growth)
        for labels in points:
            if journal.has(**labels):
                continue
            reason = self._reason_to_skip(labels, growth)
            if reason:
                journal.write("skipped", section=self.kind, **labels, reason=reason)
                continue
            started = time.monotonic()
            journal.write("begun", section=self.kind, **labels)
            self._note(self._attempt(labels), growth)
            self._spent[self.series(labels)] = time.monotonic() - started

    def _reason_to_skip(self, labels: Labels, growth: Growth) -> str | None:
        series = self.series(labels)
        if not growth.allows(series, _place(labels)):
            return "the series ended at a shorter length: it failed or became slow there"
        fits = self.bench.section.fits(_LONGER * self._spent.get(series, 0.5))
        return None if fits else "no time left in this section"

    def _note(self, record: dict[str, Any], growth: Growth) -> None:
        """What the series takes, or that it failed."""
        if self.kind in (record["kind"], record.get("section")):
            growth.note(self.series(record), _place(record), record.get("seconds", math.inf))

    def _attempt(self, labels: Labels) -> dict[str, Any]:
        """One record, of a time or of a failure."""
        try:
            record = self.bench.journal.write(self.kind, **labels, **self.measure(labels))
            seconds, share = record["seconds"], record["floor_seconds"] / record["seconds"]
            said = f"{seconds * 1e3:.3f} ms, {record['tokens_per_second']:,.0f} tokens/s, {share:.1%} of the floor"
        except Exception as error:  # noqa: BLE001 - one broken case must not hide the others
            said, too_large = text_of(error), isinstance(error, torch.OutOfMemoryError)
            failure = {"error": said, "out_of_memory": too_large}
            record = self.bench.journal.write("failed", section=self.kind, **labels, **failure)
        print(f"  {', '.join(f'{name} {value}' for name, value in labels.items())}: {said}", flush=True)
        release_memory(self.bench.device)
        return record


def _place(labels: Labels) -> int:
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
