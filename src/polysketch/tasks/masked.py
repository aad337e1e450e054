"""Inputs without their answers: some tokens are hidden, and a model finds them from both sides."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import torch

from polysketch.data import PreparedData, TrainingWindows, mask_tokens
from polysketch.tasks.base import Split, Task
from polysketch.tasks.batch import Row
from polysketch.tasks.rows import shuffled


class Inputs(Protocol):
    """Rows of tokens that nothing is asked about."""

    vocab_size: int
    longest: int
    alphabet: str

    def num_rows(self, split: Split) -> int | None:
        """Rows of a split; None where there is no end of them."""

    def ids(self, split: Split, index: int) -> np.ndarray:
        """(length,) the tokens of row number `index` (from 0): always the same."""


class TaskInputs:
    """What a task asks about. Both documents of a pair are rows of their own.

    Args:
        task: any, of rows of tokens.

    Raises:
        ValueError: pictures in patches, which are no tokens.
    """

    def __init__(self, task: Task) -> None:
        if task.asks == "picture":
            raise ValueError("expected rows of tokens to hide some of, found pictures in patches")
        self._task, self._documents = task, 2 if task.asks == "pair" else 1
        self.vocab_size, self.longest, self.alphabet = task.vocab_size, task.longest, task.alphabet

    def num_rows(self, split: Split) -> int | None:
        """As `Inputs` has it."""
        count = self._task.num_rows(split)
        return None if count is None else count * self._documents

    def ids(self, split: Split, index: int) -> np.ndarray:
        """As `Inputs` has it."""
        row = self._task.row(split, index // self._documents)
        return row.ids if row.second is None or index % 2 == 0 else row.second


class TextInputs:
    """Windows of prepared text, with whatever documents stand in them.

    Those to train on are `TrainingWindows`, others in every epoch; held-out text is cut from its beginning.

    Args:
        data: the text.
        context: tokens of a window.
        seed: of the order of the windows.
    """

    def __init__(self, data: PreparedData, context: int, seed: int) -> None:
        self.vocab_size, self.longest, self.alphabet = data.tokenizer.vocab_size, context, data.tokenizer.sha256
        self._data = data
        self._windows = TrainingWindows(data.split("train").tokens, context, seed)

    def num_rows(self, split: Split) -> int | None:
        """As `Inputs` has it."""
        if split == "train":
            return None
        held = len(self._data.split(split).tokens) if split in self._data.description.splits else 0
        return -(-held // self.longest)

    def ids(self, split: Split, index: int) -> np.ndarray:
        """As `Inputs` has it."""
        if split == "train":
            return self._windows.window(index)[:-1].numpy()
        start = index * self.longest
        return np.asarray(self._data.split(split).tokens[start : start + self.longest], dtype=np.int64)


_DRAWS = 64
"""Of what is hidden in a row, until something is; then a single token is. A small share would be drawn for long."""


class MaskedTokens(Task):
    """Rows of which some tokens are hidden, and asked for (`data.mask_tokens`): the training of BERT.

    In training other tokens are hidden whenever a row comes again; in other splits they are always the same. Every row
    asks for at least one.

    Args:
        inputs: the rows.
        share: of the tokens, to ask for.
        seed: of what is hidden, and of the order of the rows.
    """

    name = "masked-tokens"
    asks = "each"

    def __init__(self, inputs: Inputs, share: float = 0.15, seed: int = 0) -> None:
        self._inputs, self._share, self._seed = inputs, share, seed

    @property
    def vocab_size(self) -> int:
        """Those of the inputs, and the mask, which is the last."""
        return self._inputs.vocab_size + 1

    @property
    def longest(self) -> int:
        """That of the inputs."""
        return self._inputs.longest

    @property
    def alphabet(self) -> str:
        """That of the inputs; the mask is told by its place."""
        return self._inputs.alphabet

    def num_rows(self, split: Split) -> int | None:
        """As the base class has it; there is no end of ways to hide tokens in training."""
        return None if split == "train" else self._inputs.num_rows(split)

    def row(self, split: Split, index: int) -> Row:
        """As the base class has it."""
        ids = torch.from_numpy(np.asarray(self._inputs.ids(split, self._place(split, index)), dtype=np.int64))
        digest = hashlib.blake2b(f"mask/{self._seed}/{split}/{index}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        for _ in range(_DRAWS):
            hidden, answer = self._masked(ids, self._share, generator)
            if (answer >= 0).any():
                return Row(hidden.numpy(), answer.numpy())
        one = torch.arange(len(ids)) == torch.randint(len(ids), (1,), generator=generator)
        hidden, answer = self._masked(ids, 1.0, generator, one)
        return Row(hidden.numpy(), answer.numpy())

    def _masked(
        self, ids: torch.Tensor, share: float, generator: torch.Generator, among: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.vocab_size
        return mask_tokens(ids, vocab_size=size, mask_id=size - 1, share=share, generator=generator, key_mask=among)

    def _place(self, split: Split, index: int) -> int:
        count = self._inputs.num_rows(split)
        return index if count is None or split != "train" else int(shuffled(np.array([index]), count, self._seed)[0])
