"""What the runs of a study share is made by one process, while the others wait for it."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from polysketch.storage import FolderLock

LOCK_FILE = ".shared-lock"
_BETWEEN_LOOKS = 0.5  # seconds


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a folder that the runs of a study share; a process that finds it held says so and waits.

    The lock dies with its process. Whoever waited looks again whether there is still something to make.

    Args:
        folder: made where it is missing.
    """
    with contextlib.ExitStack() as held:
        waiting = False
        while True:
            try:
                held.enter_context(FolderLock(folder / LOCK_FILE))
                break
            except RuntimeError:
                if not waiting:
                    print(f"waiting for another process, which makes what the runs in {folder} share", file=sys.stderr)
                waiting = True
                time.sleep(_BETWEEN_LOOKS)
        yield
