"""Rows of a task, and how they become tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from polysketch.targets import NO_TARGET

BEGINNING = 0
"""The token that stands before the first one of a sequence that is written."""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        ids: (length,) tokens.
        answer: (length,) tokens or classes, -100 where nothing is asked; or one class; or (any length,) the tokens to
            be written.
        second: (any length,) tokens of the second document of a pair; None for others.
    """

    ids: np.ndarray
    answer: np.ndarray | int
    second: np.ndarray | None = None


@dataclass(frozen=True)
class TaskBatch:
    """Rows side by side.

    Attributes:
        inputs: what a model's `loss` takes by name, besides the answers; each (rows, ...).
        answers: (rows, length) tokens or classes with -100 where nothing is asked, or (rows,) classes; int64.
    """

    inputs: Mapping[str, Tensor]
    answers: Tensor

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.answers)

    @cached_property
    def num_tokens(self) -> int:
        """Answers: as many as the mean loss is over."""
        return int((self.answers != NO_TARGET).sum())

    def split(self, rows: int) -> list[TaskBatch]:
        """Parts of so many rows each; the last may have fewer."""
        return [self._part(start, start + rows) for start in range(0, len(self), rows)]

    def _part(self, start: int, stop: int) -> TaskBatch:
        return TaskBatch({name: x[start:stop] for name, x in self.inputs.items()}, self.answers[start:stop])

    def to(self, device: torch.device) -> TaskBatch:
        """The same on a device."""
        moved = {name: x.to(device, non_blocking=True) for name, x in self.inputs.items()}
        return TaskBatch(moved, self.answers.to(device, non_blocking=True))


def collated(rows: Sequence[Row], asks: str) -> TaskBatch:
    """Rows side by side, with padding behind the shorter ones.

    Args:
        rows: at least one.
        asks: what the task asks. A model that is not causal is told what is padding (`key_mask`, `source_mask`), and
            one that writes gets what it has written so far: `BEGINNING`, and then the answer.
    """
    if asks == "picture":
        pixels = torch.from_numpy(np.stack([row.ids for row in rows]).astype(np.uint8))
        return TaskBatch({"pixels": pixels}, torch.tensor([int(row.answer) for row in rows]))
    ids, real = _padded([row.ids for row in rows], 0)
    inputs = {"ids": ids, "key_mask": real}
    if asks in ("class", "pair"):
        if asks == "pair":
            inputs["second"], inputs["second_mask"] = _padded([np.asarray(row.second) for row in rows], 0)
        return TaskBatch(inputs, torch.tensor([int(row.answer) for row in rows]))
    answers, _ = _padded([np.asarray(row.answer) for row in rows], NO_TARGET)
    if asks == "next":
        return TaskBatch({"ids": ids}, answers)
    if asks in ("each", "labels", "recovered"):
        return TaskBatch(inputs, answers)
    written = torch.nn.functional.pad(answers[:, :-1].clamp(min=0), (1, 0), value=BEGINNING)
    return TaskBatch({"source": ids, "source_mask": real, "ids": written}, answers)


def _padded(arrays: Sequence[np.ndarray], fill: int) -> tuple[Tensor, Tensor]:
    """(rows, longest) int64 with `fill` behind the shorter ones, and which of it is real."""
    lengths = np.array([len(array) for array in arrays])
    real = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(real.shape, fill, dtype=np.int64)
    padded[real] = np.concatenate(arrays)
    return torch.from_numpy(padded), torch.from_numpy(real)
