"""A folder that appears whole or not at all: written beside its place under another name, synced, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # not a POSIX system: two writers of one folder are then not told apart
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".partial"
LOCK_FILE = ".polysketch-prepare-lock"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Give a temporary sibling ``OUT.partial`` to write into, which becomes ``out`` when the block ends well.

    If the block raises, Ctrl-C included, the temporary is removed. If the process is killed, the temporary stays, and
    the next one takes its place: a lock that dies with its process tells a stale one from one in use.

    Args:
        out: The folder to make; it must not exist, or be empty. Parents are made.

    Yields:
        The temporary folder.

    Raises:
        FileExistsError: ``out`` holds something, another process is writing it, or the temporary's name is taken by
            something else.
        OSError: The disk is full; nothing is left behind.
    """
    out = Path(os.path.abspath(out))
    _require_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.with_name(out.name + SUFFIX)
    with _claimed(staging):
        try:
            yield staging
            _sync(staging)
            staging.rename(out)
        except OSError as error:
            _remove(staging)
            if error.errno not in DISK_FULL:
                raise
            raise OSError(error.errno, _disk_full(out)) from error
        except BaseException:
            _remove(staging)
            raise
    (out / LOCK_FILE).unlink()
    _sync_folder(out.parent)


def _require_free(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise FileExistsError(
            f"expected a new or empty folder for --out, found {out} with contents: choose another name or remove it"
        )


@contextlib.contextmanager
def _claimed(staging: Path) -> Iterator[None]:
    """Hold the lock of an empty temporary folder."""
    if staging.exists() and not (staging.is_dir() and _is_ours(staging)):
        raise FileExistsError(f"expected {staging} to be free for a temporary folder, found something else there")
    staging.mkdir(exist_ok=True)
    with (staging / LOCK_FILE).open("a") as lock:
        _lock(lock, staging)
        for path in staging.iterdir():
            if path.name != LOCK_FILE:
                path.unlink()
        yield


def _is_ours(staging: Path) -> bool:
    # An empty one was killed between making the folder and making its lock.
    return (staging / LOCK_FILE).exists() or not any(staging.iterdir())


def _lock(lock: IO[str], staging: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FileExistsError(
            f"expected no other prepare of the same folder, found one at work in {staging}"
        ) from error


def _remove(staging: Path) -> None:
    shutil.rmtree(staging, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    if fcntl is None:  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_full(out: Path) -> str:
    free = shutil.disk_usage(out.parent).free
    return (
        f"expected room for {out}, found the disk full ({free / 1e6:.0f} MB free without the unfinished folder): "
        "free some space or choose --out on another disk (a token takes 2 bytes up to 65,536 ids, else 4)"
    )
