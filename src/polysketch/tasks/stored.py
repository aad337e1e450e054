"""Classified rows in files, read where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from polysketch.tasks.base import Asks, Split
from polysketch.tasks.batch import Row
from polysketch.tasks.stored_task import StoredTask, ends_with, joined, part


@dataclass(frozen=True)
class ClassifiedRows:
    """One split.

    Attributes:
        ids: tokens of all documents, one after the other; a row has one of them, or two.
        ends: (documents,) int64, where each ends in `ids`.
        classes: (rows,) the class of each.
    """

    ids: np.ndarray
    ends: np.ndarray
    classes: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], classes: Sequence[int]) -> ClassifiedRows:
        """Of memory.

        Args:
            rows: tokens of each document, the second one of a pair behind its first.
            classes: of rows.
        """
        return cls(*joined(list(rows)), np.array(classes, dtype=np.int64))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.classes)

    def document(self, index: int) -> np.ndarray:
        """(length,) the tokens of document number `index`, from 0, as they are stored."""
        return part(self.ids, self.ends, index)

    def chosen(self, indices: np.ndarray) -> ClassifiedRows:
        """Some of the rows, by their numbers."""
        documents = len(self.ends) // len(self)
        numbers = [int(index) * documents + number for index in indices for number in range(documents)]
        return ClassifiedRows.of([self.document(number) for number in numbers], self.classes[indices].tolist())

    def fit_together(self) -> bool:
        """Whether the arrays are of as many rows and tokens as one another say."""
        return len(self.ends) in (len(self), 2 * len(self)) and ends_with(self.ids, self.ends)


class Classification(StoredTask[ClassifiedRows]):
    """Rows of one class each, from files: texts, pairs of texts, lists of symbols or the pixels of images.

    Args:
        splits: rows by the name of their split; "train" at least.
        vocab_size: ids of tokens.
        class_names: of the classes, in order.
        shape: (height, width, channels) where rows are pixels; None for others.
        alphabet: what ids stand for, for instance the sha256 of a tokenizer; "" where it is not known.
        documents: of a row; 2 for pairs.
        patch_size: pixels of a side of a patch; each patch is then a token. None: each pixel is one.

    Raises:
        ValueError: fewer than two classes, no rows to train on, an empty row, or patches that do not divide the shape.
    """

    name = "classification"

    def __init__(
        self,
        splits: Mapping[str, ClassifiedRows],
        vocab_size: int,
        class_names: Sequence[str],
        shape: Sequence[int] | None = None,
        alphabet: str = "",
        documents: Literal[1, 2] = 1,
        patch_size: int | None = None,
    ) -> None:
        super().__init__(splits, vocab_size, alphabet)
        self.asks: Asks = "class" if documents == 1 else "pair"
        self.class_names, self._patch_size = tuple(class_names), patch_size
        self.shape = None if shape is None else _height_width_channels(shape)
        if patch_size is not None:
            self.asks = "picture"
            _check_patch(patch_size, self.shape)
        if len(self.class_names) < 2 or not len(self._splits.get("train", ())):
            raise ValueError(
                f"expected rows of at least two classes to train on, found {len(self._splits.get('train', ()))} rows "
                f"of {len(self.class_names)} classes"
            )
        for split, rows in self._splits.items():
            lengths = np.diff(rows.ends, prepend=0)
            if not len(lengths) or not (lengths > 0).all() or len(lengths) != self.documents * len(rows):
                raise ValueError(
                    f"{split}: expected rows of {self.documents} documents of at least one token, found an empty one, "
                    "another number of them, or no row"
                )
            if int(np.max(rows.classes)) >= len(self.class_names):
                raise ValueError(
                    f"{split}: expected classes below {len(self.class_names)}, found {int(np.max(rows.classes))}"
                )

    @property
    def documents(self) -> Literal[1, 2]:
        """Of a row: 2 where the task is about pairs."""
        return 2 if self.asks == "pair" else 1

    @property
    def num_classes(self) -> int:
        """As many as there are names."""
        return len(self.class_names)

    @property
    def longest(self) -> int:
        """Of all splits; in patches where there are any."""
        if self.shape is not None and self._patch_size is not None:
            return self.shape[0] * self.shape[1] // self._patch_size**2
        return max(int(np.diff(rows.ends, prepend=0).max()) for rows in self._splits.values())

    @property
    def image_size(self) -> tuple[int, int, int] | None:
        """As the base class has it."""
        return None if self._patch_size is None else self.shape

    @property
    def patch_size(self) -> int | None:
        """As given."""
        return self._patch_size

    def row(self, split: Split, index: int) -> Row:
        """As the base class has it."""
        rows, first = self.rows_of(split), self.documents * index
        found = [np.asarray(rows.document(first + number), dtype=np.int64) for number in range(self.documents)]
        if max(int(ids.max()) for ids in found) >= self.vocab_size:
            raise ValueError(f"{split}: expected ids below {self.vocab_size} in row {index}, found others: damaged?")
        return Row(found[0], int(rows.classes[index]), *found[1:])

    def options(self) -> dict[str, Any]:
        """As the base class has it."""
        shape = None if self.shape is None else list(self.shape)
        named: dict[str, Any] = {"alphabet": self.alphabet, "documents": self.documents, "patch_size": self.patch_size}
        return {"vocab_size": self.vocab_size, "class_names": list(self.class_names), "shape": shape, **named}


def _height_width_channels(shape: Sequence[int]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ValueError(f"expected a shape of height, width and channels, found {shape!r:.40}")
    return shape[0], shape[1], shape[2]


def _check_patch(side: int, shape: tuple[int, int, int] | None) -> None:
    if shape is None:
        raise ValueError(f"patches of {side} x {side} pixels: expected images, found rows of another kind")
    height, width, _ = shape
    if side < 1 or height % side or width % side:
        fitting = [str(each) for each in range(1, min(height, width) + 1) if height % each == width % each == 0]
        raise ValueError(
            f"expected patches that divide images of {height} x {width} pixels, of a side of {', '.join(fitting)}, "
            f"found {side}"
        )
