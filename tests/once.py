"""What several processes of one session of tests need is made by one of them."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the session, which `make` is given to fill: whoever else asks meanwhile waits for it.

    Files of tests are dealt out to processes, so that what takes seconds to train would be trained in each of them.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose folders are in that of the session
        root = root.parent
    folder = root / f"once-{name}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = folder.with_suffix(".unfinished")
            made.mkdir(exist_ok=True)
            make(made)
            made.rename(folder)
    return folder
