"""What figures of rows say of a claim about a task: of one row, of any row, or of rows beside softmax."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from polysketch.studies.rows import parsed
from polysketch.studies.study import Record, Verdict

By = Literal["accuracy", "whole_rows", "loss"]

SOFTMAX = "softmax"

_QUADRATIC = (SOFTMAX, "polynomial", "squared-polynomial")
_LINEAR = "linear"  # the option by which a squared polynomial is computed in linear time


def in_linear_time(row: str) -> bool:
    """Whether a row is a mechanism whose time grows as the length, or nearly so: none that looks at all pairs."""
    name, options = parsed(row)
    return name not in _QUADRATIC or bool(options.get(_LINEAR))


@dataclass(frozen=True)
class Figures:
    """A figure of every row that was made.

    Attributes:
        of: by row, the mean over its seeds.
        by: what it is; a loss is the better the lower it is.
    """

    of: Mapping[str, float]
    by: By = "accuracy"

    @classmethod
    def of_records(cls, records: Iterable[Record], by: By) -> Figures:
        """Those of records of tasks."""
        found: dict[str, list[float]] = {}
        for one in records:
            found.setdefault(one["row"], []).append(one["test"][by])
        return cls({row: mean(values) for row, values in found.items()}, by)

    def told(self, *rows: str) -> str:
        """In words, those of the rows that were made."""
        made = [row for row in rows if row in self.of]
        if self.by == "loss":
            return ", ".join(f"{row} {self.of[row]:.2g} nats" for row in made)
        whole = " of rows without a mistake" if self.by == "whole_rows" else ""
        return ", ".join(f"{row} {100 * self.of[row]:.1f} %" for row in made) + whole * bool(made)

    def reaches(self, row: str, wanted: float) -> bool:
        """Whether a row has the figure, or a better one."""
        return self.of[row] <= wanted if self.by == "loss" else self.of[row] >= wanted

    def best(self, rows: Collection[str]) -> str:
        """The best of these rows, all of which were made."""
        return (min if self.by == "loss" else max)(rows, key=lambda row: self.of[row])


def of_row(figures: Figures, judged: str, wanted: float) -> Verdict:
    """The claim that one row reaches a figure; where it was not made, the best of those that were is told."""
    if judged not in figures.of:
        return Verdict(figures.told(figures.best(figures.of)), None)
    return Verdict(figures.told(judged), figures.reaches(judged, wanted))


def of_any(figures: Figures, rows: Collection[str], wanted: float) -> Verdict:
    """The claim that some row reaches a figure: one shows it, and only all `rows` of the study show that none does."""
    best = figures.best(figures.of)
    if figures.reaches(best, wanted):
        return Verdict(figures.told(best), True)
    return _none_reaches(figures.told(best), figures, rows)


def as_softmax(figures: Figures, judged: str, wanted: float) -> Verdict:
    """The claim that one row reaches a figure as softmax does: where softmax does not, nothing is said of the row."""
    if not {SOFTMAX, judged} <= figures.of.keys():
        return Verdict(_beside_softmax(figures), None)
    told = figures.told(SOFTMAX, judged)
    if not figures.reaches(SOFTMAX, wanted):
        return Verdict(told, None, _not_learned(wanted))
    return Verdict(told, figures.reaches(judged, wanted))


def near_softmax(figures: Figures, judged: str | None, rows: Collection[str], behind: float, learned: float) -> Verdict:
    """The claim that a row is no more than so much behind softmax, which has learned the task itself.

    Args:
        figures: accuracies.
        judged: the row; any in linear time when None, where one that is near shows it, and only all show that none is.
        rows: of the study.
        behind: an accuracy.
        learned: accuracy from which on softmax has learned the task.
    """
    others = [row for row in figures.of if (row == judged if judged else in_linear_time(row))]
    if SOFTMAX not in figures.of or not others:
        return Verdict(_beside_softmax(figures), None, "" if others else "nothing to compare with softmax")
    best = figures.best(others)
    told = figures.told(SOFTMAX, best)
    if not figures.reaches(SOFTMAX, learned):
        return Verdict(told, None, _not_learned(learned))
    if figures.of[best] >= figures.of[SOFTMAX] - behind:
        return Verdict(told, True)
    return Verdict(told, False) if judged else _none_reaches(told, figures, list(filter(in_linear_time, rows)))


def _beside_softmax(figures: Figures) -> str:
    """Softmax and the best of the others, as far as they were made."""
    others = [row for row in figures.of if row != SOFTMAX]
    return figures.told(SOFTMAX, *([figures.best(others)] if others else []))


def _none_reaches(told: str, figures: Figures, rows: Collection[str]) -> Verdict:
    missing = sum(row not in figures.of for row in rows)
    return Verdict(told, None, f"{missing} of {len(rows)} rows not measured") if missing else Verdict(told, False)


def _not_learned(wanted: float) -> str:
    return f"softmax has not learned it, {100 * wanted:g} % wanted"
