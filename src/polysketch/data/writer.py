"""The file of tokens of one split, written as the documents come."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polysketch.data.description import SplitDescription


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id, little-endian."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class SplitWriter:
    """Appends documents to a token file and counts what it wrote."""

    def __init__(self, path: Path, dtype: np.dtype, end_of_text: int) -> None:
        """Create the file.

        Args:
            path: The file; an existing one is overwritten.
            dtype: Of the ids.
            end_of_text: Id to end each document with.
        """
        self.documents = 0
        self.tokens = 0
        self.bytes = 0
        self.path = path
        self._dtype = dtype
        self._end = np.array([end_of_text], dtype=dtype).tobytes()
        self._hash = hashlib.sha256()
        self._file = path.open("wb")

    def write(self, ids: Sequence[int], num_bytes: int) -> None:
        """Append one document and its end of text; ``num_bytes`` is the length of its text in UTF-8."""
        contents = np.asarray(ids, dtype=self._dtype).tobytes() + self._end
        self._file.write(contents)
        self._hash.update(contents)
        self.documents += 1
        self.tokens += len(ids) + 1
        self.bytes += num_bytes

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def description(self) -> SplitDescription:
        """What the file holds."""
        return SplitDescription(self.path.name, self.tokens, self.documents, self.bytes, self._hash.hexdigest())
