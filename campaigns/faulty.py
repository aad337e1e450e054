"""A disk that fails, kills or is cut off at a chosen system call: `faulty.c`, between a process and the C library.

What a process started in its turn, a compiler for one, is not looked at; nor are writes through a mapping of memory.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")

WRITE, SYNC, RENAME, UNLINK, MAKE, CUT = 1, 2, 4, 8, 16, 32
ANY = 63
FAIL, SHORTEN, SIGNAL = 1, 2, 3

_KINDS = {"w": WRITE, "s": SYNC, "r": RENAME, "u": UNLINK, "m": MAKE, "o": MAKE, "t": MAKE, "c": CUT}


def why_none() -> str | None:
    """Why there are no faulty disks here; None where there are."""
    if not sys.platform.startswith("linux"):
        return "faults at system calls want Linux"
    return None if shutil.which("cc") else "faults at system calls want a C compiler, cc"


def preloaded(folder: Path) -> dict[str, str]:
    """The environment of processes whose disk can fail; compiles what they need into `folder`.

    Raises:
        RuntimeError: it cannot be compiled here.
    """
    if reason := why_none():
        raise RuntimeError(reason)
    library = folder / "faulty.so"
    command = ["cc", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-ldl"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"cc failed: {made.stderr.strip()[:300]}")
    return {"LD_PRELOAD": str(library)}


def arm(
    folder: str, log: str, *, at: int = 0, what: int = 0, number: int = 0, kinds: int = ANY, lasting: bool = False
) -> None:
    """Called in the process, before its command.

    Args:
        folder: below which calls count.
        log: gets a line for each that was made.
        at: number of the call, from 1, at which something happens; 0 for never.
        what: `FAIL`, `SHORTEN` (half of a write is done) or `SIGNAL`.
        number: of the error or the signal.
        kinds: of calls at which it may happen; one of others is left alone, and it happens at the next.
        lasting: whether it happens at all later ones too; after a short write, that later ones fail.
    """
    words = (folder.encode(), at, what, number, kinds, int(lasting), log.encode())
    begin = ctypes.CDLL(None).faulty_arm
    begin.argtypes = [ctypes.c_char_p, ctypes.c_long, *[ctypes.c_int] * 4, ctypes.c_char_p]
    begin(*words)


@dataclass
class Call:
    """A call that was made.

    Attributes:
        kind: a letter, see `faulty.c`.
        path: of the file; of a renamed one the old.
        target: its new path.
        size: bytes written; bytes that were there when it was synced, opened or cut; of a rename the number under which
            what it replaced is kept, or 0.
    """

    kind: str
    path: Path
    target: Path
    size: int

    @property
    def of_kind(self) -> int:
        """Of the kinds by which faults are chosen."""
        return _KINDS[self.kind]


def calls(log: Path) -> list[Call]:
    """What a log tells."""
    lines = log.read_text().splitlines() if log.exists() else []
    found = (line.split("\t") for line in lines)
    return [Call(kind, Path(path), Path(target), int(size)) for kind, path, target, size in found]


@dataclass
class _Disk:
    """What was not waited for to be on the disk.

    Attributes:
        synced: file -> bytes that are there for certain; of others all are.
        renamed: old name, new name, and what stood there before.
    """

    synced: dict[Path, int] = field(default_factory=dict)
    renamed: list[tuple[Path, Path, Path | None]] = field(default_factory=list)


def cut_power(log: Path) -> None:
    """Take back what the process of a log did not wait for: written bytes are gone, new names are the old ones.

    A disk may do so, and it may do less. Deleted files and new folders stay as they are, but for folders of old names.
    """
    disk = _Disk()
    for call in calls(log):
        if call.kind in "ot":
            disk.synced.setdefault(call.path, call.size)
        elif call.kind == "s" and call.path.is_dir():
            disk.renamed = [done for done in disk.renamed if done[1].parent != call.path]
        elif call.kind == "s":
            disk.synced[call.path] = call.size
        elif call.kind == "r":
            kept = log.with_name(f"{log.name}-{call.size}") if call.size else None
            disk.renamed.append((call.path, call.target, kept))
            disk.synced = {_moved(path, call.path, call.target): size for path, size in disk.synced.items()}
    for path, size in disk.synced.items():
        if path.is_file() and path.stat().st_size > size:
            os.truncate(path, size)
    for old, new, kept in reversed(disk.renamed):
        if new.exists() and not old.exists():
            old.parent.mkdir(parents=True, exist_ok=True)  # where it was deleted since then, that is taken back too
            new.rename(old)
            if kept is not None:
                shutil.copyfile(kept, new)


def _moved(path: Path, old: Path, new: Path) -> Path:
    return new / path.relative_to(old) if path.is_relative_to(old) else path


def forget(log: Path) -> None:
    """Delete a log, and what was kept beside it."""
    for path in log.parent.glob(f"{log.name}*"):
        path.unlink()
