"""Files as bytes, uncompressed where their names end in ``.gz``."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; a compressed one is uncompressed as it is read.

    Raises:
        FileNotFoundError, PermissionError: The file cannot be opened.
        ValueError: It should be a gzip file and is none, or is cut short.
    """
    try:
        with gzip.open(path, "rb") if _is_compressed(path) else path.open("rb") as file:
            yield file  # type: ignore[misc]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"expected a whole gzip file, found a truncated or damaged one: {path}: {error}") from error


def read_bytes(path: Path) -> bytes:
    """The contents of a file; errors as in ``open_bytes``."""
    with open_bytes(path) as file:
        return file.read()


def plain_name(path: Path) -> str:
    """The name of a file without ``.gz``."""
    return path.stem if _is_compressed(path) else path.name


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"
