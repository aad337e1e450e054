"""Tokens that lie in several files, read as one sequence without being copied."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

# Files mapped at a time. Each costs a file descriptor, of which a process often has no more than 1024.
MAPPED_FILES = 256


@dataclass(frozen=True)
class TokenFile:
    """Where some tokens lie.

    Attributes:
        path: The file.
        dtype: Of the ids.
        tokens: Number of ids.
        offset: Bytes of the file before the first of them.
    """

    path: Path
    dtype: np.dtype
    tokens: int
    offset: int = 0

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

    def __init__(self, files: Sequence[TokenFile]) -> None:
        """Keep the places of the files; nothing is opened.

        Args:
            files: At least one.

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
            FileNotFoundError, ValueError: A file is gone, or shorter than it should be.
        """
        if isinstance(where, slice):
            return self._slice(*where.indices(len(self)))
        if isinstance(where, np.ndarray):
            return self._gather(where)
        position = operator.index(where)
        return self._gather(np.array(position + len(self) if position < 0 else position))[()]

    def between(self, start: int, stop: int) -> ShardedTokens:
        """The ids at the positions from `start` to before `stop`, not read yet; both in [0, length]."""
        parts = [
            TokenFile(
                file.path,
                file.dtype,
                min(stop, end) - max(start, end - file.tokens),
                file.offset + max(start - (end - file.tokens), 0) * file.dtype.itemsize,
            )
            for file, end in zip(self.files, self._ends.tolist(), strict=True)
            if max(start, end - file.tokens) < min(stop, end)
        ]
        return ShardedTokens(parts or [TokenFile(self.files[0].path, self.dtype, 0)])

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
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right").tolist()
        parts = [self._inside(number, start, stop) for number in range(first, last + 1)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

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
