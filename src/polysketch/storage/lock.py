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
    that others get. The folder itself is locked too, where its file system can: whoever deletes the file lets nobody
    in.

    Args:
        path: the lock file in the folder; created with its folder when missing, and left in place.

    Raises:
        RuntimeError: on entering, when another process holds the lock.
        ValueError: on entering, when the lock file is a link, whose target would be overwritten, or no file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptors: list[int] = []

    def __enter__(self) -> "FolderLock":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_symlink():
            raise ValueError(f"expected a lock file at {self.path}, found a symbolic link: delete it")
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"expected a lock file at {self.path}, found a folder, a pipe or a device: delete it")
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        self._descriptors = [descriptor]
        try:
            _lock(descriptor)
            self._lock_folder()
        except (BlockingIOError, PermissionError) as error:
            holder = os.read(descriptor, _TEXT).decode(errors="replace").strip() or "another process"
            self._close()
            raise RuntimeError(
                f"{self.path.parent} is in use by {holder}: expected a folder that no other process works in; "
                "wait for that process, stop it, or give another --out"
            ) from error
        except BaseException:
            self._close()
            raise
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return self

    def _lock_folder(self) -> None:
        """Lock the folder itself; network file systems may lock files alone."""
        if fcntl is None:
            return
        folder = os.open(self.path.parent, os.O_RDONLY)
        self._descriptors.append(folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            return

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


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
