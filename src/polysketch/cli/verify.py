"""`polysketch verify FOLDER`: whether every byte is what was written."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from polysketch.cli.terminal import visible

__all__ = ["VerifyFlags", "run"]


@dataclass(frozen=True)
class VerifyFlags:
    """Read every file of a folder, and compare it with the sums that were written beside it.

    It takes prepared text, tasks, training runs and conversions with all their checkpoints, and exported models. It
    finds damage, not malice: whoever can write the files can write the sums. Exit status 1 where anything is not as it
    was written.

    Examples:
      polysketch verify data/own runs/own exported
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER...")]
    """What to look at."""

    json: bool = False
    """Print everything as one JSON object on the last line."""


def run(flags: VerifyFlags) -> int:
    """Print a line for each folder, and one for each thing that is wrong.

    Args:
        flags: the command line.

    Returns:
        Exit status 0, or 1 where something is damaged.

    Raises:
        FileNotFoundError: a folder does not exist.
        ValueError: no folder is named, or one is of another kind.
    """
    if not flags.folders:
        raise ValueError("expected at least one folder, found none")
    from polysketch.training.requirements import require_folder

    for folder in flags.folders:
        require_folder(folder)
    from polysketch.training.verification import verify

    results = {str(folder): verify(folder, progress=True) for folder in flags.folders}
    for name, found in results.items():
        state = f"{len(found.problems)} damaged" if found.problems else "whole"
        print(visible(f"{name}: {found.kind}, {found.parts} parts: {state}"))
        for problem in found.problems:
            print(visible(f"  {problem}"), file=sys.stderr)
    if flags.json:
        print(json.dumps({name: asdict(found) for name, found in results.items()}))
    return int(any(found.problems for found in results.values()))
