"""What several processes of one session of tests need is made by one of them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

try:
    import fcntl
except ImportError:  # Windows, where each process makes its own
    fcntl = None  # type: ignore[assignment]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the session, which `make` is given to fill: whoever else asks meanwhile waits for it.

    Files of tests are dealt out to processes, so that what takes seconds to train would be trained in each of them.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ and fcntl is not None:
        root = root.parent  # of the session, in which each process has a folder
    folder = root / f"once-{name}"
    with _alone(root / f"once-{name}.lock"):
        if not folder.exists():
            made = folder.with_suffix(".unfinished")
            made.mkdir(exist_ok=True)
            make(made)
            made.rename(folder)
    return folder


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nobody else is here meanwhile."""
    with open(path, "w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
