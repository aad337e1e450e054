"""Tokens that lie in several files, read as one sequence without being copied."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

# Files mapped at a time. Each costs a file descriptor, of which a process often has no more than 1024.
MAPPED_FILES = 256


class DocumentEnds(Protocol):
    """Where the documents of a file end, if that is known otherwise than by an id."""

    def count(self, start: int, stop: int) -> int:
        """Number of documents whose last token lies in [start, stop); empty ones may be counted."""

    def between(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) of the last tokens of documents, int64, ascending.

        Position 0 is the first byte of the file.
        """


@dataclass(frozen=True)
class TokenFile:
    """Where some tokens lie.

    Attributes:
        path: The file.
        dtype: Of the ids.
        tokens: Number of ids.
        offset: Bytes of the file before the first of them.
        ends: Where documents end in it; None where only an id says so.
    """

    path: Path
    dtype: np.dtype
    tokens: int
    offset: int = 0
    ends: DocumentEnds | None = field(default=None, repr=False, compare=False)

    @property
    def num_documents(self) -> int:
        """Documents that end in it, as far as the file itself says it; else 0."""
        first = self.offset // self.dtype.itemsize
        return 0 if self.ends is None else self.ends.count(first, first + self.tokens)

    def map(self) -> np.memmap:
        """The ids, a read-only memory map of shape (tokens,).

        Raises:
            FileNotFoundError: The file is gone.
            ValueError: It is shorter than it should be.
        """
        require_size(self.path, self.offset + self.tokens * self.dtype.itemsize, exactly=False)
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=(self.tokens,))


class ShardedTokens:
    """Token ids in several files, as one read-only sequence.

    It answers as a one-dimensional array does to ``len``, to an index, a slice and an array of positions. A slice
    inside one file is a view of its memory map; one that lies in several files is copied. Files are mapped when they
    are first read, at most 256 at a time, so that there may be more files than a process may open.

    Attributes:
        files: The files in their order.
        dtype: Of the ids, the same in all files.
    """

    def __init__(self, files: Sequence[TokenFile], *, vocab_size: int | None = None) -> None:
        """Keep the places of the files; nothing is opened.

        Args:
            files: At least one.
            vocab_size: Refuse ids at or above it as they are read; None to trust the files.

        Raises:
            ValueError: There is none, or they hold ids of several types.
        """
        dtypes = {file.dtype for file in files}
        if len(dtypes) != 1:
            raise ValueError(
                f"expected token files of one type, found {', '.join(sorted(map(str, dtypes))) or 'no files'}"
            )
        self.files = tuple(file for file in files if file.tokens)
        self.dtype = dtypes.pop()
        self._vocab_size = vocab_size
        self._ends = np.cumsum([file.tokens for file in self.files], dtype=np.int64)
        self._starts = self._ends - [file.tokens for file in self.files]
        self._map = functools.lru_cache(maxsize=MAPPED_FILES)(self._mapped)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def shape(self) -> tuple[int]:
        """(number of ids,)."""
        return (len(self),)

    def __getitem__(self, where: int | np.integer | slice | np.ndarray) -> np.ndarray:
        """Some of the ids.

        Args:
            where: A position, a slice, or integers in [0, length) of any shape.

        Returns:
            As NumPy gives it: one id, or an array of `dtype`.

        Raises:
            IndexError: A position lies outside.
            FileNotFoundError: A file is gone.
            ValueError: A file is shorter than it should be, or has an id outside the vocabulary.
        """
        if isinstance(where, slice):
            return self._checked(self._slice(*where.indices(len(self))))
        if isinstance(where, np.ndarray):
            return self._checked(self._gather(where))
        position = operator.index(where)
        return self._checked(self._gather(np.array(position + len(self) if position < 0 else position)))[()]

    def between(self, start: int, stop: int) -> ShardedTokens:
        """The ids at the positions from `start` to before `stop`, not read yet; both in [0, length]."""
        parts = []
        for number in self._numbers(start, stop):
            file, begin = self.files[number], int(self._starts[number])
            first, after = max(start - begin, 0), min(stop - begin, file.tokens)
            offset = file.offset + first * file.dtype.itemsize
            parts.append(TokenFile(file.path, file.dtype, after - first, offset, file.ends))
        parts = parts or [TokenFile(self.files[0].path, self.dtype, 0)]
        return ShardedTokens(parts, vocab_size=self._vocab_size)

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) of the last tokens of documents, as far as the files themselves say it; int64."""
        found = [np.empty(0, dtype=np.int64)]
        for file in self.between(start, stop).files:
            first = file.offset // self.dtype.itemsize
            if file.ends is not None:
                found.append(start + file.ends.between(first, first + file.tokens) - first)
            start += file.tokens
        return np.concatenate(found)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """All ids in memory."""
        if copy is False and len(self.files) > 1:
            raise ValueError("expected tokens in several files to be copied into one array, found copy=False")
        return np.array(self[:], dtype=dtype)

    def _slice(self, start: int, stop: int, step: int) -> np.ndarray:
        if step != 1:
            return self._gather(np.arange(start, stop, step))
        if stop <= start:
            return np.empty(0, dtype=self.dtype)
        parts = [self._inside(number, start, stop) for number in self._numbers(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _numbers(self, start: int, stop: int) -> range:
        """Which files hold [start, stop)."""
        if stop <= start:
            return range(0)
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right").tolist()
        return range(first, last + 1)

    def _inside(self, number: int, start: int, stop: int) -> np.ndarray:
        """What of [start, stop) lies in one file."""
        begin = int(self._starts[number])
        return self._map(number)[max(start - begin, 0) : stop - begin]

    def _gather(self, positions: np.ndarray) -> np.ndarray:
        """The ids at positions in any order; neighbours in the same file are read together."""
        flat = positions.reshape(-1)
        if not flat.size:
            return np.empty(positions.shape, dtype=self.dtype)
        if flat.min() < 0 or flat.max() >= len(self):
            raise IndexError(f"expected positions in [0, {len(self)}), found {flat.min()} to {flat.max()}")
        number = np.searchsorted(self._ends, flat, side="right")
        bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(flat)]
        found = np.empty(len(flat), dtype=self.dtype)
        for begin, end in itertools.pairwise(bounds):
            file = int(number[begin])
            found[begin:end] = self._map(file)[flat[begin:end] - self._starts[file]]
        return found.reshape(positions.shape)

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        if self._vocab_size is not None and ids.size and (ids.max() >= self._vocab_size or ids.min() < 0):
            found = ids.max() if ids.max() >= self._vocab_size else ids.min()
            raise ValueError(
                f"expected token ids from 0 to {self._vocab_size - 1} in {self.files[0].path.parent}, found {found}: "
                "the files are of another tokenizer or vocabulary size, or not of the type they seem to be"
            )
        return ids

    def _mapped(self, number: int) -> np.ndarray:
        return self.files[number].map()


Tokens: TypeAlias = np.ndarray | ShardedTokens
"""Ids one after another: an array, usually a memory map, or several files that are read as one."""


def joined(files: Sequence[TokenFile]) -> Tokens:
    """The tokens of some files: of one file its memory map, which nothing is faster than."""
    return files[0].map() if len(files) == 1 and files[0].tokens else ShardedTokens(files)


def stretch(tokens: Tokens, start: int, stop: int) -> Tokens:
    """The ids from `start` to before `stop` without reading them; what a slice of several files would copy."""
    return tokens[start:stop] if isinstance(tokens, np.ndarray) else tokens.between(start, min(stop, len(tokens)))


def require_size(path: Path, expected: int, *, exactly: bool = True) -> None:
    """Refuse a token file that is gone, or has not the size it should have.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is shorter or, where that matters, longer.
    """
    if not path.exists():
        raise FileNotFoundError(f"expected the token file {path}, found nothing: the folder was copied incompletely")
    found = path.stat().st_size
    if found < expected or (exactly and found != expected):
        raise ValueError(
            f"expected {expected} bytes in {path}, found {found}: the file was cut short or altered; "
            "copy it again or prepare again"
        )
