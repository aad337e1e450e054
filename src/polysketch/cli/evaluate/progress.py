"""How much of an evaluation is done, on a terminal."""

import sys
from collections.abc import Callable

__all__ = ["share_done"]


def share_done() -> Callable[[int, int], None] | None:
    """What shows a person (done, total) as a share; None where stderr goes into a file."""
    return _overwrite_line if sys.stderr.isatty() else None


def _overwrite_line(done: int, total: int) -> None:
    print(f"\r{100 * done / total:5.1f} %", end="\r" if done == total else "", file=sys.stderr, flush=True)
