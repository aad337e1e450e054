"""What a new task folder has to find before it is made. PyTorch takes a second to load, and is not needed to tell."""

from __future__ import annotations

from pathlib import Path

from polysketch.storage import require_free
from polysketch.tasks.registry import TASKS

FROM_FILES = ("texts", "pairs", "words", "sequences", "images", "pathfinder", "digits")
"""Tasks that are read from local files; `digits` from those of scikit-learn."""


def check_requirements(name: str, out: Path | None) -> None:
    """Refuse an unknown task, and a folder that is in use.

    Args:
        name: of a task in `TASKS` or `FROM_FILES`.
        out: the folder to make.

    Raises:
        ValueError: no such task; the message lists them. Or no folder for rows of files.
        FileExistsError: the folder holds something.
    """
    if name not in (*TASKS, *FROM_FILES):
        raise ValueError(f"expected a task of {', '.join((*TASKS, *FROM_FILES))}, found {name!r}")
    if out is not None:
        require_free(out)
    elif name in FROM_FILES:
        raise ValueError(f"{name}: expected --out, a folder to make, found none")
