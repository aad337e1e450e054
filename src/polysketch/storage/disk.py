"""The file operations that the safety of runs and folders depends on, one function each.

Everything that a checkpoint, a configuration, metrics or a prepared folder do to be safe goes through this module, so
that a test can count the operations, fail any one of them, or act out a power cut before it. Callers therefore write
`disk.rename(...)`, never `from disk import rename`. Each function raises OSError with the path in it.

Nothing here goes through a symbolic link: what is written or deleted is what has the name, never what it points to. A
folder may come from a stranger, or a checkpoint may have been moved to another disk and linked back.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"

_WINDOWS = os.name == "nt"  # it syncs no folders, and files only through a descriptor that may write
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_NO_WAITING = getattr(os, "O_NONBLOCK", 0)  # for whoever reads a pipe; without effect on files


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put `path` into an OSError that comes without one (a failed write or sync has none)."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write(path: Path, data: bytes) -> None:
    """Create the file `path` with `data`; not yet safe from a power cut, see `sync`.

    A file of that name is refused: whoever may write in the folder could have made it another name of a file elsewhere.
    """
    with _naming(path), open(path, "xb", opener=_open) as file:
        file.write(data)


def append(path: Path, data: bytes) -> None:
    """Append `data` to `path` with one unbuffered write: a killed process leaves whole lines or a torn last one."""
    with _naming(path), open(path, "ab", buffering=0, opener=_open) as file:
        written = file.write(data)
        while written < len(data):
            written += file.write(data[written:])


def _open(path: str, flags: int) -> int:
    """Open to write, unless the name is a link's, a pipe's or a device's."""
    try:
        descriptor = os.open(path, flags | _NO_LINKS | _NO_WAITING, 0o666)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise OSError(errno.EEXIST, f"expected a new file to write, found {_kind_of(path)}", path) from error
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "expected a file to write, found a symbolic link", path) from error
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "expected a file to write, found a pipe", path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "expected a file to write, found a pipe or a device", path)
    return descriptor


def _kind_of(path: str) -> str:
    if os.path.islink(path):
        return "a symbolic link"
    return "a file of that name" if os.path.isfile(path) else "a pipe, a device or a folder"


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    if _WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if _WINDOWS else os.O_RDONLY)
    try:
        with _naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give `source` the name `target`, in the place of a file of that name; atomic within a file system."""
    os.replace(source, target)


def make_folder(path: Path) -> None:
    """Create one folder, whose parent exists."""
    os.mkdir(path)


def delete(path: Path) -> None:
    """Delete one file."""
    os.unlink(path)


def delete_folder(path: Path) -> None:
    """Delete one empty folder."""
    os.rmdir(path)


def temporary_name(path: Path) -> Path:
    """The name next to `path` under which it is made: hidden, and recognised by `is_temporary`."""
    return path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")


def is_temporary(path: Path) -> bool:
    """Whether `path` is the leftover of an interrupted operation of this module's callers."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY_SUFFIX)


def replace_file(path: Path, data: bytes) -> None:
    """Replace `path` by `data` so that a reader, or a restart after a power cut, sees the old or the new content."""
    temporary = temporary_name(path)
    if temporary.is_symlink() or temporary.exists():
        delete(temporary)  # of a killed process; or a link or a pipe, which somebody put there
    write(temporary, data)
    sync(temporary)
    rename(temporary, path)
    sync(path.parent)


def publish_folder(temporary: Path, target: Path) -> None:
    """Give the finished folder `temporary` the name `target`, everything in it being on the disk before.

    Args:
        temporary: holds everything; beside `target`, so on the same file system.
        target: does not exist, or is an empty folder (on Windows: does not exist).
    """
    sync_tree(temporary)
    rename(temporary, target)
    sync(target.parent)


def sync_tree(folder: Path) -> None:
    """Wait until a folder is on the disk with everything below it."""
    for entry in sorted(folder.iterdir()):
        sync_tree(entry) if entry.is_dir() and not entry.is_symlink() else sync(entry)
    sync(folder)


def delete_tree(folder: Path) -> None:
    """Delete a folder of files that nobody needs any more, or a file; of a link the link alone."""
    if folder.is_symlink() or not folder.is_dir():
        delete(folder)
        return
    for entry in sorted(folder.iterdir()):
        delete_tree(entry)
    delete_folder(folder)
