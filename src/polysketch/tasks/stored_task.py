"""What tasks whose rows are stored have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from polysketch.tasks.base import Split, Task


class StoredRows(Protocol):
    """One split: a dataclass of arrays, each of which is a file (`row_files`)."""

    def __len__(self) -> int:
        """Number of rows."""

    def chosen(self, indices: np.ndarray) -> Self:
        """Some of the rows, by their numbers."""

    def fit_together(self) -> bool:
        """Whether the arrays are of as many rows and tokens as one another say."""


Rows = TypeVar("Rows", bound=StoredRows)


class StoredTask(Task, Generic[Rows]):
    """Rows out of files.

    Args:
        splits: rows by the name of their split.
        vocab_size: ids of tokens.
        alphabet: what ids stand for, for instance the sha256 of a tokenizer; "" where it is not known.
    """

    def __init__(self, splits: Mapping[str, Rows], vocab_size: int, alphabet: str) -> None:
        self._splits, self._vocab_size, self._alphabet = dict(splits), vocab_size, alphabet

    @property
    def vocab_size(self) -> int:
        """As given."""
        return self._vocab_size

    @property
    def alphabet(self) -> str:
        """As given."""
        return self._alphabet

    @property
    def splits(self) -> dict[str, Rows]:
        """The rows of each split."""
        return self._splits

    def num_rows(self, split: Split) -> int:
        """As the base class has it; 0 of a split that is not there."""
        return len(self._splits[split]) if split in self._splits else 0

    def rows_of(self, split: Split) -> Rows:
        """The rows of a split.

        Raises:
            ValueError: there is no such split.
        """
        if split not in self._splits:
            raise ValueError(f"expected a split of {', '.join(self._splits)}, found {split!r}, which has no rows")
        return self._splits[split]

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """What the constructor takes besides the rows; JSON values."""

    def of_splits(self, splits: Mapping[str, Rows]) -> Self:
        """The same task with other rows."""
        return type(self)(splits, **self.options())


def part(values: np.ndarray, ends: np.ndarray, index: int) -> np.ndarray:
    """Number `index` of the parts of `values`, which stand one after the other and end where `ends` says."""
    return values[int(ends[index - 1]) if index else 0 : int(ends[index])]


def joined(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Parts one after the other, and where each ends: what `part` takes apart."""
    values = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return values, np.cumsum([len(each) for each in parts], dtype=np.int64)


def ends_with(values: np.ndarray, ends: np.ndarray) -> bool:
    """Whether the last part, if there is one, ends where the values do."""
    return not len(ends) or int(ends[-1]) == len(values)
