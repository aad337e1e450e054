"""Readers with faults that guided fuzzing has to find."""

import os
import signal
from pathlib import Path

from campaigns.guided_targets import Target


def _make(_: Path, folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"--------")


def _read_nested(folder: Path) -> None:
    """One of 2^48 beginnings of six letters: by chance nobody finds it."""
    a, b, c, d, e, f = (folder / "a.txt").read_bytes().ljust(6)[:6]
    if a == ord("f"):  # noqa: SIM102 - each comparison is a step
        if b == ord("a"):  # noqa: SIM102
            if c == ord("u"):  # noqa: SIM102
                if d == ord("l"):  # noqa: SIM102
                    if e == ord("t"):  # noqa: SIM102
                        if f == ord("y"):
                            raise KeyError("planted")


def _is_whole(folder: Path) -> bool:
    return (folder / "a.txt").read_bytes() in (b"", b"--------")


def _read_crashing(folder: Path) -> None:
    if not _is_whole(folder):
        os.kill(os.getpid(), signal.SIGSEGV)


def _read_hanging(folder: Path) -> None:
    while not _is_whole(folder):
        pass


def _read_filling(folder: Path) -> None:
    if not _is_whole(folder):
        raise KeyError(len(b"a" * (8 << 30)))


NESTED = Target(_make, ("a.txt",), _read_nested)
CRASHING = Target(_make, ("a.txt",), _read_crashing)
HANGING = Target(_make, ("a.txt",), _read_hanging, seconds=1)
FILLING = Target(_make, ("a.txt",), _read_filling)
