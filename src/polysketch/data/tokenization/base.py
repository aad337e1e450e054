"""What every tokenizer can do: text to token ids and back, and the exact number of bytes behind each id."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

# Text that normalising tokenizers change: leading and doubled spaces, a decomposed accent, a full-width letter,
# a line end of two characters, the mark that sentencepiece uses for a space, an astral character, a zero byte.
LOSSLESS_PROBE = "  a  e\u0301 \uff21\r\n\t\u2581x \U0001f600\u0000 ."


class TokenizerLike(ABC):
    """A tokenizer: ``encode``, ``decode`` and the bytes of each token.

    Subclasses give ``encode_batch`` and a table of the bytes that each id stands for; everything else follows from
    the table, so that ``decode_bytes`` and ``token_bytes`` cannot disagree. Special tokens, the end of text among
    them, stand for no bytes, and ``encode`` never produces one: text that happens to spell it is encoded as text.

    Attributes:
        kind: Key of the class in ``TOKENIZERS``.
        file_name: Name of the file that ``save`` writes, or None when there is nothing to save.
        end_of_text: Id of the token that ends a document.
    """

    kind: ClassVar[str]
    file_name: ClassVar[str | None]
    end_of_text: int

    def __init__(self, pieces: Sequence[bytes], end_of_text: int, *, usual_end_of_text: int | None = -1) -> None:
        """Keep the table of bytes.

        Args:
            pieces: The bytes of each id.
            end_of_text: Id of the token that ends a document.
            usual_end_of_text: What the file alone says of it, None when it is silent; -1: the same.
        """
        self._pieces = list(pieces)
        self.end_of_text = end_of_text
        self._end_of_text_is_usual = usual_end_of_text in (-1, end_of_text)

    @classmethod
    @abstractmethod
    def train(cls, texts: Iterable[str], vocab_size: int | None) -> Self:
        """Make a tokenizer from text.

        Args:
            texts: Documents, read once, in order.
            vocab_size: Number of ids, special ones included; None where the kind has no such choice.

        Raises:
            ValueError: The vocabulary size is missing, superfluous or too small.
        """

    @classmethod
    @abstractmethod
    def load(cls, path: Path, end_of_text: str | int | None = None) -> Self:
        """Read the file that ``save`` or the original library wrote.

        Args:
            path: The file.
            end_of_text: The token that ends a document, or its id; None for the one that the file itself makes out.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is damaged or describes another kind of tokenizer, or has no such token.
        """

    @abstractmethod
    def serialized(self) -> bytes:
        """The whole tokenizer as bytes, as ``save`` writes it: equal bytes mean the same tokenizer."""

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without any special token.

        Raises:
            ValueError: A text holds half a surrogate pair, which no UTF-8 text can.
        """

    def encode(self, text: str) -> list[int]:
        """Token ids of one text, without any special token; see ``encode_batch``."""
        return self.encode_batch([text])[0]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes behind the ids; special tokens give none. An id may end in the middle of a character.

        Raises:
            ValueError: An id lies outside the vocabulary.
        """
        return b"".join(self._piece(int(index)) for index in ids)

    def known_bytes(self, ids: Iterable[int]) -> bytes:
        """As `decode_bytes`; ids beyond the vocabulary, which a padded model may write, stand for nothing."""
        return self.decode_bytes(index for index in ids if index < self.vocab_size)

    def decode(self, ids: Iterable[int]) -> str:
        """The text behind the ids; bytes that are not (yet) a whole character become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """Number of bytes of text each id stands for, int64 of shape (vocab_size,); special tokens count 0.

        The sum over ``encode(text)`` is exactly ``len(text.encode())`` for a lossless tokenizer, so that a loss in
        nats per token turns into exact bits per byte.
        """
        return np.array([len(piece) for piece in self._pieces], dtype=np.int64)

    def save(self, folder: Path) -> Path | None:
        """Write the tokenizer under its ``file_name`` in a folder; returns the path, None when nothing is needed."""
        if self.file_name is None:
            return None
        path = folder / self.file_name
        path.write_bytes(self.serialized())
        return path

    @property
    def name(self) -> str:
        """Kind and size, for instance ``"bpe:8192"``."""
        return f"{self.kind}:{self.vocab_size}"

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return len(self._pieces)

    @property
    def sha256(self) -> str:
        """Fingerprint: equal for two tokenizers exactly when they encode every text, and end it, alike."""
        chosen = b"" if self._end_of_text_is_usual else f"\nend of text {self.end_of_text}".encode()
        return hashlib.sha256(self.serialized() + chosen).hexdigest()

    @functools.cached_property
    def lossless(self) -> bool:
        """Whether decoding gives back every byte of the text (tried on a probe that normalising tokenizers change)."""
        return self.decode_bytes(self.encode(LOSSLESS_PROBE)) == LOSSLESS_PROBE.encode()

    def _piece(self, index: int) -> bytes:
        if not 0 <= index < len(self._pieces):
            raise ValueError(
                f"expected token ids in [0, {len(self._pieces)}) of tokenizer {self.name}, found {index}: "
                "the ids probably come from another tokenizer"
            )
        return self._pieces[index]


def require_same_tokenizer(expected: TokenizerLike, found: TokenizerLike, *, owner: str, other: str) -> None:
    """Refuse two things that were made with different tokenizers.

    Args:
        expected: Tokenizer of the first.
        found: Tokenizer of the second.
        owner: What the first belongs to, in words, for the message ("the model runs/a").
        other: What the second belongs to ("the data folder books").

    Raises:
        ValueError: The tokenizers differ in any way.
    """
    if expected.sha256 != found.sha256:
        raise ValueError(
            f"expected the tokenizer of {owner} ({expected.name}, sha256 {expected.sha256[:12]}), found that of "
            f"{other} ({found.name}, sha256 {found.sha256[:12]}): token ids would mean different text; prepare the "
            "data again with --tokenizer pointing at the folder the model was trained on"
        )


def check_unicode(texts: Iterable[str]) -> None:
    """Raise ValueError for text that UTF-8 cannot hold (lone surrogates)."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"expected text that UTF-8 can hold, found half a surrogate pair at character {error.start}: "
                "it probably comes from a damaged \\u escape or from undecodable bytes"
            ) from error
