"""A lock on a folder that dies with its process."""

import os
import socket
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # Windows, where a range of bytes is locked instead
    fcntl = None  # type: ignore[assignment]

_BEYOND_THE_TEXT = 2**20
_TEXT = 200


class FolderLock:
    """Holds a folder for one process, as a context manager.

    The lock is the operating system's (`flock`, on Windows a locked byte), not the presence of a file: however the
    process ends, the lock is gone, and a leftover lock file means nothing. The file names the holder, for the message
    that others get.

    Args:
        path: the lock file in the folder; created with its folder when missing, and left in place.

    Raises:
        RuntimeError: on entering, when another process holds the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def __enter__(self) -> "FolderLock":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor)
        except (BlockingIOError, PermissionError) as error:
            holder = os.read(descriptor, _TEXT).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise RuntimeError(
                f"{self.path.parent} is in use by {holder}: expected a folder that no other process works in; "
                "wait for that process, stop it, or give another --out"
            ) from error
        except OSError:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(descriptor: int) -> None:
    """Lock the file or raise BlockingIOError (`flock`) or PermissionError (Windows); closing it unlocks it."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    os.lseek(descriptor, _BEYOND_THE_TEXT, os.SEEK_SET)  # a locked byte cannot be read by others
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
