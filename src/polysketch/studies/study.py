"""What a study is, and how its runs are made, kept and shown."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from polysketch.benchmarking.workbench import save
from polysketch.storage import disk
from polysketch.studies import kept
from polysketch.studies.in_turn import one_at_a_time
from polysketch.studies.presentation import markdown_table
from polysketch.studies.summaries import SUMMARY_FILE, state_of

Record = Mapping[str, Any]

TABLE_FILE = "table.md"


@dataclass(frozen=True)
class Verdict:
    """What the records of a study say of its claim.

    Attributes:
        ours: our figure, in words.
        holds: whether the claim holds here; None where the records cannot tell.
        why_open: why they cannot, in a few words.
    """

    ours: str
    holds: bool | None
    why_open: str = ""


class Study(ABC):
    """Rows, sizes and a claim. A run is one row with one seed, and leaves one record.

    Attributes:
        claim: one sentence.
        paper: its figure in the paper.
        rows: names of the rows.
        sizes: settings by size, frozen dataclasses of JSON values; "smoke" is one of seconds, and those whose names
            begin with "paper" are the paper's own.
        needs: rows without which nothing is said of the claim: those that it is about or compares with.
    """

    claim: str
    paper: str
    rows: Sequence[str]
    sizes: Mapping[str, Any]
    needs: Sequence[str] = ()

    def check_row(self, row: str) -> None:
        """Refuse what is no row.

        Raises:
            ValueError: the message lists the rows.
        """
        if row not in self.rows:
            raise ValueError(f"expected rows of {', '.join(self.rows)}, found {row!r}")

    @abstractmethod
    def depends_on(self, row: str, seed: int, settings: Any) -> dict[str, Any]:
        """All that a record depends on; JSON values."""

    @abstractmethod
    def make(self, row: str, seed: int, settings: Any, folder: Path) -> dict[str, Any]:
        """Make a run in a folder of its own, or go on with it; returns its figures, JSON values.

        Raises:
            KeyboardInterrupt: it was stopped, and can be gone on with.
        """

    @abstractmethod
    def table(self, records: Sequence[Record]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """A heading, and the rows below it, of records in order."""

    @abstractmethod
    def draw(self, records: Sequence[Record], folder: Path) -> None:
        """Plots of the records into a folder."""

    @abstractmethod
    def judge(self, records: Sequence[Record]) -> Verdict:
        """What the records say of the claim; takes those of any rows."""

    def verdict(self, records: Sequence[Record]) -> Verdict:
        """As `judge`, but open while a row that the study `needs` has no record."""
        found = self.judge(records)
        made = {one["row"] for one in records}
        missing = [row for row in self.needed(made) if row not in made]
        return Verdict(found.ours, None, f"{' and '.join(missing)} not measured") if missing else found

    def needed(self, made: Collection[str]) -> Sequence[str]:
        """The rows that the study `needs`, where some rows were made that may stand for others."""
        return self.needs

    def told_size(self, settings: Any) -> str:
        """What makes a size easier or harder than the paper's, in a few words; nothing where its name says enough."""
        return ""

    def size_called(self, size: str) -> str:
        """`told_size` of a size, or of the one that it changes; nothing where there is no such size any more."""
        settings = self.sizes.get(size.partition("+")[0])
        return "" if settings is None else self.told_size(settings)

    def papers(self) -> dict[str, str]:
        """`told_size` of the paper's own sizes, by name."""
        return {size: self.size_called(size) for size in self.sizes if size.startswith("paper")}


@dataclass(frozen=True)
class Places:
    """Where a study of one size keeps its things.

    Attributes:
        runs: folders of runs in progress, and finished ones.
        results: records, plots and table.
    """

    runs: Path
    results: Path

    @classmethod
    def of(cls, name: str, size: str, out: Path, results: Path) -> Places:
        """Those of a study, where `size` may be one of `changed`; what a smoke run shows stays with its runs."""
        runs = out / f"{name}-{size}"
        smoke = size.partition("+")[0] == "smoke"
        return cls(runs, runs / "results" if smoke else results / f"{name}-{size}")


def changed(size: str, changes: Sequence[str]) -> str:
    """A size with other settings, `cpu+steps=100`: its records stand apart from those of the size."""
    return "+".join([size, *sorted(re.sub(r"[^\w.,=-]", "", change) for change in changes)])


def run_study(
    name: str,
    study: Study,
    size: str,
    places: Places,
    *,
    rows: Sequence[str],
    seeds: Sequence[int],
    settings: Any,
    say: Callable[[str], None] = print,
) -> str:
    """Make the runs that are missing, show everything there is, and return the table.

    Args:
        name, study: of the study.
        size: its name, for people.
        places: where its things are.
        rows, seeds: which runs.
        settings: those of the size, or changed ones.
        say: gets a line for each run.

    Raises:
        ValueError: a record that is there was made with other settings.
        KeyboardInterrupt: stopped; the same call goes on.
    """
    for seed in seeds:
        for row in rows:
            run = f"{row}-seed{seed}"
            file = places.results / f"{run}.json"
            if file.is_file():
                say(f"{run}: there is a record, {file}")
            told = study.depends_on(row, seed, settings)
            # A run that was killed is gone on with by the same settings alone.
            make = partial(_made, study, row, seed, settings, places.runs / f"{run}-{kept.digest(told)}")
            made = kept.kept_or_made(file, told, make)
            say(f"{run}: {study.judge([made]).ours}")
    with one_at_a_time(places.runs):  # other processes may be at other runs of the study
        return show(name, study, size, places.results)


def _made(study: Study, row: str, seed: int, settings: Any, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return {"row": row, "seed": seed, "provenance": kept.provenance(), **study.make(row, seed, settings, folder)}


def show(name: str, study: Study, size: str, results: Path) -> str:
    """Write table.md, plots and summary.json of all records in a folder, and return the table with its one line."""
    files = [path for path in sorted(results.glob("*.json")) if path.name != SUMMARY_FILE]
    place = {row: number for number, row in enumerate(study.rows)}  # rows that are not among them come last
    found_rows = sorted((kept.read(path, "row", "seed") for path in files), key=lambda one: (one["row"], one["seed"]))
    records = sorted(found_rows, key=lambda one: place.get(one["row"], len(place)))
    verdict = study.verdict(records)
    made, own = {one["row"] for one in records}, set(study.rows)
    # What the list tells of the study is kept too: asking the study itself would load PyTorch.
    found: dict[str, Any] = {"study": name, "size": size, "told": study.size_called(size), "papers": study.papers()}
    found |= {"runs": len(records), "rows": len(made), "own_rows": len(made & own), "of_rows": len(own)}
    found |= {"ours": verdict.ours, "holds": verdict.holds}
    found |= {"why_open": verdict.why_open} if verdict.why_open else {}
    state = state_of(found)
    line = f"{study.claim} Paper: {study.paper}. Here: {verdict.ours}. {state[0].upper()}{state[1:]}."
    text = f"{markdown_table(*study.table(records))}\n\n{line}\n"
    disk.replace_file(results / TABLE_FILE, text.encode())
    study.draw(records, results)
    save(found, results / SUMMARY_FILE)
    return text
