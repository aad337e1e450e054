"""Which versions of large files were compared with their sums already: a list in the user's cache.

A version is a place, a size and a time of change. Whoever changes bytes and puts the time back is not noticed here, nor
is a disk that forgets: `polysketch verify` reads everything.
"""

import contextlib
import json
from pathlib import Path

from polysketch.storage import disk
from polysketch.storage.outside import read_object
from polysketch.user_cache import user_cache

_MOST = 10_000  # files that are remembered: the newest


def is_compared(path: Path, sha256: str) -> bool:
    """Whether this version of a file was found to have this sum before; False where that cannot be known."""
    return _read().get(str(path.resolve())) == [*_version(path), sha256]


def remember(path: Path, sha256: str) -> None:
    """Note that this version of a file has this sum; where the cache cannot be written, nothing is noted."""
    with contextlib.suppress(OSError):
        known = _read()
        known.pop(str(path.resolve()), None)
        known[str(path.resolve())] = [*_version(path), sha256]
        file = _file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk.replace_file(file, json.dumps(dict(list(known.items())[-_MOST:])).encode())


def _version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _file() -> Path:
    return user_cache() / "compared.json"


def _read() -> dict[str, list[int | str]]:
    try:
        return read_object(_file())
    except (OSError, ValueError):
        return {}
