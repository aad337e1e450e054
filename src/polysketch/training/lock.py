"""A lock on a run folder that dies with its process."""

import errno
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

_BUSY = {errno.EACCES, errno.EAGAIN}


class RunLock:
    """Holds a run folder for one process, as a context manager.

    The lock is the operating system's (`flock`), not the presence of a file: however the process ends, the lock is
    gone, and a leftover lock file means nothing. The file names the holder, for the message that others get.

    Args:
        path: the lock file; created with its folder when missing, and left in place.

    Raises:
        RuntimeError: on entering, when another process holds the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def __enter__(self) -> "RunLock":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            if error.errno not in _BUSY:
                raise
            raise RuntimeError(
                f"{self.path.parent} is in use by {holder}: expected a run folder that nobody trains in; "
                "wait for that run, stop it, or give another --out"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
