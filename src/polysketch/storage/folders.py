"""A folder that appears whole or not at all: written beside its place under another name, synced, then renamed."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from polysketch.storage import disk
from polysketch.storage.lock import FolderLock
from polysketch.storage.sums import write_sums

SUFFIX = ".partial"
LOCK_FILE = ".polysketch-lock"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def whole_folder(out: Path, *, record: str | None = None, sums: bool = False) -> Iterator[Path]:
    """Give a temporary sibling `OUT.partial` to write into, which becomes `out` when the block ends well.

    If the block raises, Ctrl-C included, the temporary is removed. If the process is killed, the temporary stays, and
    the next one takes its place: a lock that dies with its process tells a stale one from one in use.

    Work that takes long may be gone on with: while there is a file `record` in the temporary, nothing is removed, and
    the next block finds everything as it was left. The file says how far the work is; the block writes it, and it is
    deleted when the folder is whole.

    Args:
        out: the folder to make; it must not exist, or be empty. Parents are made.
        record: name of that file; None where work always begins anew.
        sums: whether the folder gets a SHA256SUMS of its files.

    Yields:
        The temporary folder; it may get folders inside.

    Raises:
        FileExistsError: `out` holds something, another process is writing it, or the temporary's name is taken by
            something else.
        OSError: the disk is full; nothing is left behind but what was recorded.
    """
    out = Path(os.path.abspath(out))
    require_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + SUFFIX)
    with _claimed(temporary, record):
        try:
            yield temporary
            if sums:
                write_sums(temporary)
            disk.publish_folder(temporary, out)
        except BaseException as error:
            kept = _is_recorded(temporary, record)
            if not kept:
                _remove(temporary)
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise OSError(error.errno, _disk_full(out, temporary if kept else None)) from error
            raise
    for path in [out / name for name in (record, LOCK_FILE) if name is not None]:
        if path.exists():
            disk.delete(path)
    disk.sync(out)


def require_free(folder: Path) -> None:
    """Refuse to write over anything.

    Raises:
        FileExistsError: there is a file of that name, or a folder with contents.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"expected a new or empty folder, found the file {folder}: choose another name")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"expected a new or empty folder, found {folder} with contents: choose another name")


@contextlib.contextmanager
def _claimed(temporary: Path, record: str | None) -> Iterator[None]:
    """Hold the lock of a temporary folder that is empty, or holds what was recorded."""
    if temporary.is_symlink() or (temporary.exists() and not (temporary.is_dir() and _is_ours(temporary))):
        raise FileExistsError(f"expected {temporary} to be free for a temporary folder, found something else there")
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(FolderLock(temporary / LOCK_FILE))
        except RuntimeError as error:
            raise FileExistsError(f"expected no other process at work on the same folder: {error}") from error
        if not _is_recorded(temporary, record):
            for path in _contents(temporary):
                disk.delete_tree(path)
        yield


def _contents(temporary: Path) -> list[Path]:
    """All but the lock, by which a temporary folder is known as ours."""
    return [path for path in temporary.iterdir() if path.name != LOCK_FILE]


def _remove(temporary: Path) -> None:
    """Delete the folder as far as can be: the lock last, so that a kill meanwhile leaves what the next one may take."""
    if not temporary.exists():  # it has its name, and what failed came after
        return
    for path in _contents(temporary):
        with contextlib.suppress(OSError):
            disk.delete_tree(path)
    if not _contents(temporary):
        shutil.rmtree(temporary, ignore_errors=True)


def _is_recorded(temporary: Path, record: str | None) -> bool:
    return record is not None and (temporary / record).exists()


def _is_ours(temporary: Path) -> bool:
    # An empty one was killed between making the folder and making its lock.
    return (temporary / LOCK_FILE).exists() or not any(temporary.iterdir())


def _disk_full(out: Path, kept: Path | None) -> str:
    free = shutil.disk_usage(out.parent).free / 1e6
    if kept is None:
        return (
            f"expected room for {out}, found the disk full ({free:.0f} MB free without the unfinished folder): "
            "free some space or choose --out on another disk"
        )
    return (
        f"expected room for {out}, found the disk full ({free:.0f} MB free): free some space, then the same command "
        f"goes on with what is kept in {kept}; delete that to choose --out on another disk"
    )
