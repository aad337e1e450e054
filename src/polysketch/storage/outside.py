"""Small files that others may have written, read without trust: no pipe, no terabyte, no depth that ends the parser."""

import json
from pathlib import Path
from typing import Any

LARGEST = 2**30
"""Bytes of a file that is read whole."""


def require_file(path: Path, *, most: int | None = LARGEST) -> None:
    """Refuse what is there and is no file, or too large to be read whole; what is not there raises when it is opened.

    Raises:
        ValueError: a pipe, a device, a socket, for which one might wait for ever; or more than `most` bytes.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"expected a file, found a pipe or a device: {path}: write what it gives to a file first")
    if most is not None and path.is_file() and path.stat().st_size > most:
        raise ValueError(f"expected at most {most:,} bytes in {path}, found {path.stat().st_size:,}")


def read_json(path: Path) -> Any:
    """The JSON value of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no file, far too large, or not JSON; see `decoded`.
    """
    require_file(path)
    return decoded(path.read_bytes(), path)


def read_object(path: Path, *needed: str) -> dict[str, Any]:
    """The JSON object of a file.

    Args:
        path: of the file.
        needed: names that it has to have.

    Raises:
        OSError, ValueError: as `read_json`; or it is no object, or lacks a name.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object of JSON, found {type(found).__name__}: altered by hand?")
    missing = [name for name in needed if name not in found]
    if missing:
        raise ValueError(f"{path}: expected an object with {', '.join(needed)}, found none of {', '.join(missing)}")
    return found


def decoded(content: bytes | str, origin: str | Path) -> Any:
    """The value of JSON.

    Args:
        content: the text.
        origin: where it is from, for the message.

    Raises:
        ValueError: it is not JSON, not UTF-8, nested too deeply, or has a number of thousands of digits.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {origin}, found something else: {error}") from error
