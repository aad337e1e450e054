"""Rows in files whose answers are sequences: a label for each word, or what is to be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polysketch.targets import NO_TARGET
from polysketch.tasks.base import Asks, Split
from polysketch.tasks.batch import BEGINNING, Row
from polysketch.tasks.stored_task import StoredTask, ends_with, joined, part


@dataclass(frozen=True)
class AnsweredRows:
    """One split.

    Attributes:
        ids: tokens of all rows, one after the other.
        ends: (rows,) int64, where each ends in `ids`.
        answers: of all rows, one after the other: numbers of labels, -100 where nothing is asked; or tokens.
        answer_ends: (rows,) int64, where each ends in `answers`.
    """

    ids: np.ndarray
    ends: np.ndarray
    answers: np.ndarray
    answer_ends: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], answers: Sequence[np.ndarray]) -> AnsweredRows:
        """Of memory: tokens of each row, and its answer."""
        return cls(*joined(list(rows)), *joined(list(answers)))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.ends)

    def row(self, index: int) -> Row:
        """Row number `index`, from 0."""
        ids, answer = part(self.ids, self.ends, index), part(self.answers, self.answer_ends, index)
        return Row(np.asarray(ids, dtype=np.int64), np.asarray(answer, dtype=np.int64))

    def chosen(self, indices: np.ndarray) -> AnsweredRows:
        """Some of the rows, by their numbers."""
        found = [self.row(int(index)) for index in indices]
        return AnsweredRows.of([row.ids for row in found], [np.asarray(row.answer) for row in found])

    def fit_together(self) -> bool:
        """Whether the arrays are of as many rows and tokens as one another say."""
        whole = ends_with(self.ids, self.ends) and ends_with(self.answers, self.answer_ends)
        return whole and len(self.ends) == len(self.answer_ends)


class SequenceAnswers(StoredTask[AnsweredRows]):
    """Rows with a sequence as their answer, from files: words with a label each, or sources with their targets.

    Args:
        splits: rows by the name of their split; "train" at least.
        vocab_size: ids of tokens.
        class_names: of the labels, in order; none where a sequence is written.
        alphabet: what ids stand for, for instance the sha256 of a tokenizer; "" where it is not known.
        end: the token that ends what is written: the last one of every answer.

    Raises:
        ValueError: one label, no rows to train on, a split without rows, an empty row or answer, or labels of another
            number than the row's tokens.
    """

    name = "sequence-answers"

    def __init__(
        self,
        splits: Mapping[str, AnsweredRows],
        vocab_size: int,
        class_names: Sequence[str] = (),
        alphabet: str = "",
        end: int = BEGINNING,
    ) -> None:
        super().__init__(splits, vocab_size, alphabet)
        self.class_names, self.end = tuple(class_names), end
        self.asks: Asks = "labels" if self.class_names else "written"
        if "train" not in self._splits:
            raise ValueError("expected rows to train on, found none")
        for split, rows in self._splits.items():
            _check_lengths(split, rows, same=self.asks == "labels")
        if len(self.class_names) == 1:
            raise ValueError(f"expected at least two labels, found {self.class_names[0]!r} alone")

    @property
    def num_classes(self) -> int:
        """As many as there are names."""
        return len(self.class_names)

    @property
    def longest(self) -> int:
        """Of all rows and answers."""
        every = [ends for rows in self._splits.values() for ends in (rows.ends, rows.answer_ends)]
        return max(int(_lengths(ends).max()) for ends in every)

    def row(self, split: Split, index: int) -> Row:
        """As the base class has it."""
        found = self.rows_of(split).row(index)
        answer = np.asarray(found.answer)
        asked = answer[answer != NO_TARGET] if self.class_names else answer
        if int(found.ids.max()) >= self.vocab_size:
            raise ValueError(f"{split}: expected ids below {self.vocab_size} in row {index}, found others: damaged?")
        if ((asked < 0) | (asked >= (self.num_classes or self.vocab_size))).any():
            raise ValueError(f"{split}: expected answers of the task in row {index}, found others: damaged?")
        return found

    def options(self) -> dict[str, Any]:
        """As the base class has it."""
        named = {"class_names": list(self.class_names), "alphabet": self.alphabet, "end": self.end}
        return {"vocab_size": self.vocab_size, **named}


def _lengths(ends: np.ndarray) -> np.ndarray:
    return np.diff(ends, prepend=0)


def _check_lengths(split: str, rows: AnsweredRows, *, same: bool) -> None:
    asked, answered = _lengths(rows.ends), _lengths(rows.answer_ends)
    if not len(asked):
        raise ValueError(f"{split}: expected at least one row, found none")
    if not (asked > 0).all() or not (answered > 0).all() or (same and not np.array_equal(asked, answered)):
        raise ValueError(
            f"{split}: expected rows and answers of at least one token, and as many labels as tokens, found others: "
            "damaged?"
        )
