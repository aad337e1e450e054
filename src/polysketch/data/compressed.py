"""Files as bytes, uncompressed where their names end in ``.gz``."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from polysketch.storage.outside import require_file

LARGEST_FILE = 2**30  # bytes of a file that is read whole
_READ_AT_A_TIME = 2**18  # bytes


@contextlib.contextmanager
def open_bytes(path: Path, on_read: Callable[[int], None] | None = None) -> Iterator[BinaryIO]:
    """Open a file for reading; a compressed one is uncompressed as it is read.

    Args:
        path: The file.
        on_read: Called with the number of bytes whenever some were read from the disk, compressed ones as they are.

    Raises:
        FileNotFoundError, PermissionError: The file cannot be opened.
        ValueError: It should be a gzip file and is none, or is cut short.
    """
    require_file(path, most=None)
    try:
        with contextlib.ExitStack() as opened:
            file: Any = opened.enter_context(path.open("rb") if on_read is None else _counted(path, on_read))
            if _is_compressed(path):
                file = opened.enter_context(gzip.GzipFile(fileobj=file))
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"expected a whole gzip file, found a truncated or damaged one: {path}: {error}") from error


def _counted(path: Path, on_read: Callable[[int], None]) -> io.BufferedReader:
    return io.BufferedReader(_Counted(path, on_read), _READ_AT_A_TIME)


class _Counted(io.FileIO):
    """A file that tells how much was read of it."""

    def __init__(self, path: Path, on_read: Callable[[int], None]) -> None:
        super().__init__(path, "rb")
        self._on_read = on_read

    def readinto(self, buffer: Any) -> int | None:
        found = super().readinto(buffer)
        self._on_read(found or 0)
        return found

    def readall(self) -> bytes:
        found = super().readall()
        self._on_read(len(found))
        return found


def read_bytes(path: Path) -> bytes:
    """The contents of a file of at most a gigabyte; errors as in ``open_bytes``."""
    with open_bytes(path) as file:
        return read_bounded(file, LARGEST_FILE, str(path))


def read_bounded(file: BinaryIO, most: int, origin: str) -> bytes:
    """All of an open file, which may be a thousand times larger than on the disk.

    Raises:
        ValueError: There are more than ``most`` bytes.
    """
    contents = file.read(most + 1)
    if len(contents) > most:
        raise ValueError(f"expected at most {most:,} bytes, uncompressed, found more in {origin}")
    return contents


def plain_name(path: Path) -> str:
    """The name of a file without ``.gz``."""
    return path.stem if _is_compressed(path) else path.name


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"
