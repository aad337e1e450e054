"""Readers with faults that guided fuzzing has to find."""

import os
import signal
from pathlib import Path

from campaigns.guided_targets import Target


def _make(_: Path, folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"--------")


def _read_nested(folder: Path) -> None:
    """A capital, a small letter, a digit and a capital, each of ten: one of 400,000 by chance."""
    a, b, c, d = (folder / "a.txt").read_bytes().ljust(4)[:4]
    if 64 < a < 75:  # noqa: SIM102 - each comparison is a branch
        if 96 < b < 107:  # noqa: SIM102
            if 47 < c < 58:  # noqa: SIM102
                if 64 < d < 75:
                    raise KeyError("planted")


def _is_whole(folder: Path) -> bool:
    return (folder / "a.txt").read_bytes() in (b"", b"--------")


def _read_crashing(folder: Path) -> None:
    if not _is_whole(folder):
        os.kill(os.getpid(), signal.SIGSEGV)


def _read_hanging(folder: Path) -> None:
    while not _is_whole(folder):
        pass


NESTED = Target(_make, ("a.txt",), _read_nested)
CRASHING = Target(_make, ("a.txt",), _read_crashing)
HANGING = Target(_make, ("a.txt",), _read_hanging, seconds=1)
