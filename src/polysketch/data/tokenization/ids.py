"""What stands for a tokenizer where there are token ids alone: a number of ids, and the one that ends a document."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from polysketch.data.compressed import read_bytes
from polysketch.data.tokenization.base import TokenizerLike
from polysketch.storage.outside import decoded

MOST_IDS = 2**24
"""Many times the largest vocabulary in use; each id takes some memory."""


class TokenIds(TokenizerLike):
    """Ids whose text nobody knows: they can be trained on and evaluated; text can neither be encoded nor decoded."""

    kind = "ids"
    file_name = "ids.json"

    def __init__(self, vocab_size: int, end_of_text: int | None = None) -> None:
        """Make the vocabulary.

        Args:
            vocab_size: The data's ids are below it.
            end_of_text: The id that ends a document in the data. None where there is none: one more id stands for it,
                which the data do not have.

        Raises:
            ValueError: There are fewer than two ids, or the end of text is none of them.
        """
        if vocab_size < 2:
            raise ValueError(f"expected a vocabulary of at least 2 ids, found {vocab_size}")
        if vocab_size > MOST_IDS:
            raise ValueError(f"expected a vocabulary of at most {MOST_IDS:,} ids, found {vocab_size:,}")
        if end_of_text is not None and not 0 <= end_of_text < vocab_size:
            raise ValueError(f"expected an end of text from 0 to {vocab_size - 1}, found {end_of_text}")
        end = vocab_size if end_of_text is None else end_of_text
        super().__init__([b""] * max(vocab_size, end + 1), end, usual_end_of_text=None)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int | None) -> Self:
        """There is nothing to train.

        Raises:
            ValueError: Always.
        """
        raise ValueError("expected a tokenizer that can encode text, found ids, which stand for data without one")

    @classmethod
    def load(cls, path: Path, end_of_text: str | int | None = None) -> TokenIds:
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It does not hold a number of ids.
        """
        try:
            size = int(decoded(read_bytes(path), path)["vocab_size"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"expected a vocabulary size in {path}, found something else: {error}") from error
        return cls(size, end_of_text if isinstance(end_of_text, int) else None)

    def serialized(self) -> bytes:
        """The number of ids, as JSON."""
        return json.dumps({"vocab_size": self.vocab_size}).encode() + b"\n"

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Refused.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"expected a tokenizer to encode text, found {self.name}: the model was trained on token ids alone "
            "(--vocab-size); train with --tokenizer to have text"
        )

    @functools.cached_property
    def lossless(self) -> bool:
        """Never: there is no text."""
        return False
