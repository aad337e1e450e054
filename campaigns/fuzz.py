"""Calls of every command and of public functions, and changed files for every reader: no traceback, hang or loss.

    python -m campaigns.fuzz --count 1000 --seed 0
    python -m campaigns.fuzz --count 100 --only prepare ops "a run"

`--count` is for each command, each package and each reader. Commands get lines drawn from their flags, with good,
odd and hostile values (`command_lines.py`); public functions arguments drawn from their signatures
(`function_calls.py`); readers real files of which bits, bytes or values of JSON were changed (`mutations.py`,
`readers.py`). Every attack is a process of its own, with a bound of time and memory: a fork of this one, and for every
fiftieth command line a Python that starts anew. What is a fault: a traceback, a
signal, a hang, a refusal that is not one line, or that says no more than Python does; and for commands a file that was
there before, and is changed or gone, where no flag named it to be written.

Every attack tells what it was, so that it can be done again: the same part, seed and count.
"""

import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from campaigns import command_lines, function_calls, mutated_files, readers
from campaigns.ahead import import_ahead
from campaigns.harness import Found, main
from polysketch.ops.native import why_unavailable

PARTS = (*command_lines.commands(), *function_calls.packages(), *readers.READERS)


def campaign(count: int, seed: int, folder: Path, parts: Sequence[str] = PARTS) -> Found:
    """So many attacks on each part."""
    found, threads, before = Found(), torch.get_num_threads(), Path.cwd()
    torch.set_num_threads(1)  # no thread but this one is there to be forked
    why_unavailable()  # compiles the native programs, or every fork would
    try:
        for part in parts:
            for attack, wrong, outcome in _attacks(part, count, random.Random(f"{part} {seed}"), folder):
                kind = "command" if part in command_lines.BASES else "reader" if part in readers.READERS else "function"
                found.add(attack, wrong or f"{kind}: {outcome}", is_fault=wrong is not None)
                if wrong is not None:
                    print(f"{attack}: {wrong}", file=sys.stderr, flush=True)
            print(f"{part}: done, {len(found.faults)} faults so far", file=sys.stderr, flush=True)
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)
    return found


def _attacks(part: str, count: int, draw: random.Random, folder: Path) -> Iterator[tuple[str, str | None, str]]:
    if part in command_lines.BASES:
        place = folder / "commands"
        if not place.exists():
            place.mkdir()
            os.chdir(place)
            import_ahead(lambda: command_lines.make_place(place), command_lines.SECONDS)
        os.chdir(place)
        return command_lines.attacks(part, count, draw)
    if part in readers.READERS:
        return mutated_files.attacks(readers.make(folder / "files", part), part, count, draw)
    return function_calls.attacks(part, count, draw, folder / "files" / "sources")


def run(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return main(campaign, __doc__, 20, argv, parts=PARTS)


if __name__ == "__main__":
    sys.exit(run())
