"""Cases one after the other: each is answered in the journal, by a record, a failure or why it was left out."""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.budget import Section
from benchmarks.journal import Journal

Labels = dict[str, Any]


class DeviceLost(RuntimeError):
    """Every call on the device fails from here on; another process can go on."""


@dataclass
class Cases:
    """Runs what fits and is not answered yet; a series that failed or became slow is not continued at longer lengths.

    Attributes:
        kind: of the records.
        device: where cases run.
        section: its time.
        journal: of the run.
        series: labels -> the series that they are a point of.
        longest: seconds of a call beyond which a series ends.
        growth: the next case of a series may take so many times as long as the last one.
    """

    kind: str
    device: torch.device
    section: Section
    journal: Journal
    series: Callable[[Labels], Hashable]
    longest: float = math.inf
    growth: float = 2.0
    _ended: dict[Hashable, int] = field(default_factory=dict)
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
        ended = self._ended.get(self.series(labels), math.inf)
        if place_of(labels) >= ended:
            return f"the series ended at {ended} tokens"
        fits = self.section.fits(self.growth * self._spent.get(self.series(labels), 0.5))
        return None if fits else "no time left in this section"

    def _note(self, record: dict[str, Any]) -> None:
        """Where a series ends: at the shortest case that failed or was too slow."""
        own = record["kind"] == self.kind or record.get("section") == self.kind
        if own and (record["kind"] == "failed" or record["seconds"] > self.longest):
            series, place = self.series(record), place_of(record)
            self._ended[series] = min(place, self._ended.get(series, place))

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
