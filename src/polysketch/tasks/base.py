"""What a task is: rows with questions and answers, each a function of its number alone."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from polysketch.data.permutation import KeyedPermutation
from polysketch.tasks.batch import Row, TaskBatch, collated

Asks = Literal["next", "each", "labels", "class", "pair", "picture", "written", "recovered"]
Split = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_DRAW = 0  # of held-out rows: the same in all runs, which are compared by them


class Task(ABC):
    """Rows of tokens, what is asked about them, and the answers.

    A subclass has `row` and the sizes of its vocabulary. What it asks decides which model learns it:

    | asks | model | the answer |
    |---|---|---|
    | `next` | `TransformerLM` | at some positions, the token that is to follow there |
    | `each` | `MaskedLanguageModel`, an encoder | at some positions, a token |
    | `labels` | `TokenClassifier`, an encoder | at some positions, a class |
    | `class` | `SequenceClassifier`, an encoder | one class for the row |
    | `pair` | `PairClassifier`, an encoder | one class for two documents |
    | `picture` | `PatchClassifier`, an encoder of patches | one class for the picture |
    | `written` | `TransformerEncoderDecoder` | a sequence of its own |
    | `recovered` | `SequenceAutoencoder`, causal | the row's own tokens, out of its last vector |

    Attributes:
        name: of the task in `TASKS`.
        asks: see above.
    """

    name: ClassVar[str]
    asks: Asks

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids, of rows and of answers that are tokens."""

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 unless the task asks for one."""
        return 0

    @property
    def alphabet(self) -> str:
        """What ids stand for: the same word where they mean the same, "" where it is not known."""
        return self.name

    @property
    def image_size(self) -> tuple[int, int, int] | None:
        """(height, width, channels) where rows are pictures in patches."""
        return None

    @property
    def patch_size(self) -> int | None:
        """Pixels of a side of a patch, where rows are pictures in patches."""
        return None

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest row."""

    @abstractmethod
    def num_rows(self, split: Split) -> int | None:
        """Rows of a split; None where there is no end of them."""

    @abstractmethod
    def row(self, split: Split, index: int) -> Row:
        """Row number `index` (from 0) of a split: always the same."""

    def rows(self, split: Split, indices: np.ndarray) -> TaskBatch:
        """Rows side by side, padded to the longest of them."""
        return collated([self.row(split, int(index)) for index in indices], self.asks)

    def held_out(self, split: Split, batch_size: int, limit: int) -> Iterator[TaskBatch]:
        """Rows of a split in batches, in their order: `limit` of them at most, which are always the same.

        Files may have one class after the other, so where a split is longer the rows are drawn from all of it.
        """
        indices = _spread(self.num_rows(split), limit)
        for start in range(0, len(indices), batch_size):
            yield self.rows(split, indices[start : start + batch_size])


def _spread(count: int | None, limit: int) -> np.ndarray:
    """Numbers of `limit` rows of `count`, in order; None where there is no end of them, and each is as any other."""
    if count is None or count <= limit:
        return np.arange(limit if count is None else count)
    return np.sort(KeyedPermutation(count, _DRAW)(np.arange(limit)))


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(Task):
    """Rows that are made from a seed. A subclass is a frozen dataclass of sizes, and has `make`.

    Attributes:
        seed: of all rows. Another one gives other rows.
        examples: rows of training, seen again and again; 0 for new ones in every step.
        learned: options that a model knows by heart: with others it is asked about what it never saw.
    """

    learned: ClassVar[tuple[str, ...]] = ()
    seed: int = 0
    examples: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together, by a row that is made.

        Raises:
            ValueError: as `make`.
        """
        if self.seed < 0 or self.examples < 0:
            raise ValueError(f"seed and examples must not be negative, got {self.seed} and {self.examples}")
        self.row("train", 0)

    @property
    def vocab_size(self) -> int:
        """The size called `vocabulary`; a task without it says otherwise."""
        return int(self.options()["vocabulary"])

    @property
    def longest(self) -> int:
        """The size called `length`, which every such task has."""
        return int(self.options()["length"])

    @abstractmethod
    def make(self, generator: np.random.Generator) -> Row:
        """A row by random numbers of a generator.

        Raises:
            ValueError: sizes that cannot be.
        """

    def num_rows(self, split: Split) -> int | None:
        """As the base class has it; only training may have an end."""
        return self.examples or None if split == "train" else None

    def row(self, split: Split, index: int) -> Row:
        """As the base class has it: rows of different splits are drawn apart."""
        return self.make(np.random.default_rng([self.seed, SPLITS.index(split), index]))

    def options(self) -> dict[str, Any]:
        """All sizes; JSON values."""
        return dataclasses.asdict(self)
