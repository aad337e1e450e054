"""The files of tokens of one split, written as the documents come."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from polysketch.data.description import ShardDescription, SplitDescription
from polysketch.data.tokens import require_size
from polysketch.storage import disk


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id, little-endian."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class SplitWriter:
    """Appends tokens to files of bounded size and counts what it wrote.

    A file that is full is closed, wherever its last document stands, and the next one goes on. The names are
    ``NAME-00000.bin``, ``NAME-00001.bin`` and so on; a split that one file holds is called ``NAME.bin`` in the end.

    What is written may be committed: ``commit`` waits until it is on the disk and says what there is, and a writer that
    is made with that goes on from there, whatever was written after it.
    """

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype, shard_tokens: int, committed: SplitDescription | None = None
    ) -> None:
        """Begin, or go on.

        Args:
            folder: Where the files go.
            name: Name of the split.
            dtype: Of the ids.
            shard_tokens: Most ids of a file, at least 1.
            committed: What an earlier writer's ``commit`` said; None to begin.

        Raises:
            FileNotFoundError, ValueError: A file of what was committed is gone, or shorter than it was.
        """
        self.tokens = self.documents = self.bytes = 0
        self._folder, self._name, self._dtype = folder, name, dtype
        self._shard_bytes = shard_tokens * dtype.itemsize
        self._full: list[ShardDescription] = []
        self._room = 0  # bytes left in the open file
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None
        if committed is not None:
            self._go_on(committed)

    def write(self, tokens: np.ndarray, documents: int, num_bytes: int) -> None:
        """Append tokens.

        Args:
            tokens: Ids of the writer's dtype, one-dimensional: whole documents, each with its end of text.
            documents: How many documents these are.
            num_bytes: Length of their texts in UTF-8.
        """
        contents = memoryview(tokens.tobytes())
        while contents:
            if not self._room:
                self._next_file()
            part, contents = contents[: self._room], contents[self._room :]
            self._append(part)
        self.tokens += len(tokens)
        self.documents += documents
        self.bytes += num_bytes

    def commit(self) -> SplitDescription:
        """Wait until everything is on the disk, and describe it."""
        if self._file is not None:
            self._file.flush()
            disk.sync(self._path(len(self._full)))
        return self.description()

    def description(self) -> SplitDescription:
        """What the files hold."""
        shards = list(self._full)
        if self._file is not None:
            shards.append(self._open_shard())
        return SplitDescription(self.tokens, self.documents, self.bytes, tuple(shards))

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            self._file.close()

    def finish(self) -> SplitDescription:
        """Close, give the only file of a split its plain name, and describe the files."""
        self.close()
        found = self.description()
        if len(found.shards) != 1:
            return found
        only = found.shards[0]
        disk.rename(self._folder / only.file, self._plain_path())
        shard = ShardDescription(self._plain_path().name, only.tokens, only.sha256)
        return SplitDescription(found.tokens, found.documents, found.bytes, (shard,))

    def _append(self, part: memoryview) -> None:
        assert self._file is not None
        self._file.write(part)
        self._hash.update(part)
        self._room -= len(part)

    def _next_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            disk.sync(self._path(len(self._full)))
            self._file.close()
            self._full.append(self._open_shard())
        self._file = self._path(len(self._full)).open("wb")
        self._hash = hashlib.sha256()
        self._room = self._shard_bytes

    def _open_shard(self) -> ShardDescription:
        size = (self._shard_bytes - self._room) // self._dtype.itemsize
        return ShardDescription(self._path(len(self._full)).name, size, self._hash.hexdigest())

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number:05}.bin"

    def _plain_path(self) -> Path:
        return self._folder / f"{self._name}.bin"

    def _go_on(self, committed: SplitDescription) -> None:
        """Drop what was written after the commit, and open the last file at its end."""
        self.tokens, self.documents, self.bytes = committed.tokens, committed.documents, committed.bytes
        if self._plain_path().exists():  # killed after the only file had got its last name
            disk.rename(self._plain_path(), self._path(0))
        for path in self._folder.glob(f"{self._name}-*.bin"):
            if path.name not in {shard.file for shard in committed.shards}:
                disk.delete(path)
        if not committed.shards:
            return
        *full, last = committed.shards
        for shard in full:
            require_size(self._folder / shard.file, shard.tokens * self._dtype.itemsize)
        self._full = full
        self._reopen(last)

    def _reopen(self, shard: ShardDescription) -> None:
        path, size = self._folder / shard.file, shard.tokens * self._dtype.itemsize
        require_size(path, size, exactly=False)
        os.truncate(path, size)
        with path.open("rb") as file:
            self._hash = hashlib.file_digest(file, "sha256")
        if self._hash.hexdigest() != shard.sha256:
            raise ValueError(f"expected {path} with sha256 {shard.sha256[:12]}, found another: it was altered since")
        self._file = path.open("ab")
        self._room = self._shard_bytes - size
