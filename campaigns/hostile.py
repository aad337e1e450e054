"""Files and folders made to do harm: no code runs, nothing outside is read or written, time and memory are bounded.

    python -m campaigns.hostile --count 50 --seed 0

`--count` is for each kind of attack. An attack takes a folder of whole files of one reader (`readers.py`), does one
thing to it, and has it read in a process of its own. What is a fault: a canary of a planted pickle or script that sang;
a file outside that changed, or whose secret came out; a signal, a hang, more than a gigabyte of memory, a traceback or
a refusal that is not one line; on a terminal a control character that is not ours.
"""

import contextlib
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from campaigns import hostile_cache, hostile_files, hostile_templates, readers
from campaigns.harness import Found, main
from campaigns.isolated import Ended, complaint, isolated
from campaigns.mutated_files import reading, restore

Attack = Callable[[Path, Path, random.Random], str]
MEMORY, PEAK = 4 << 30, 1 << 30
OF_FOLDERS: dict[str, Attack] = {
    "pickles": hostile_files.plant_pickles,
    "names": hostile_files.plant_names,
    "links": hostile_files.plant_links,
    "pipes": hostile_files.plant_special,
    "sizes": hostile_files.plant_sizes,
    "escapes": hostile_files.plant_escapes,
}
"""What is done to a folder; each gives in words what it did."""

OF_OTHERS: dict[str, Callable[[Path, random.Random], Iterator[tuple]]] = {
    "bombs": hostile_files.bombs,
    "patterns": hostile_files.patterns,
    "cache": hostile_cache.attacks,
    "temporary names": hostile_files.temporary_names,
    "templates": hostile_templates.attacks,
}
"""Attacks that bring what they need: what was done, what came of it where that is told, and what is wrong."""

PARTS = (*OF_FOLDERS, *OF_OTHERS)


def campaign(count: int, seed: int, folder: Path, parts: Sequence[str] = PARTS) -> Found:
    """So many attacks of each kind."""
    found, threads, before = Found(), torch.get_num_threads(), Path.cwd()
    torch.set_num_threads(1)  # no thread but this one is there to be forked
    try:
        for part in parts:
            draw = random.Random(f"{part} {seed}")
            made = _of_folders(part, folder, draw) if part in OF_FOLDERS else OF_OTHERS[part](folder / part, draw)
            with contextlib.closing(made) as attacks:
                for _ in range(count):
                    attack, outcome, wrong = _told(next(attacks))
                    found.add(f"{part}: {attack}", wrong or f"{part}: {outcome}", is_fault=wrong is not None)
                    if wrong is not None:
                        print(f"{part}: {attack}: {wrong}", file=sys.stderr, flush=True)
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)
    return found


def _told(attack: tuple) -> tuple[str, str, str | None]:
    return attack if len(attack) == 3 else (attack[0], "held", attack[1])


def _of_folders(part: str, folder: Path, draw: random.Random) -> Iterator[tuple[str, str, str | None]]:
    """Attacks of one kind on the folder of a reader that is drawn each time, for ever."""
    outside = folder / "outside"
    while True:
        name = draw.choice(list(readers.READERS))
        place = folder / "read" / name.replace(" ", "-").replace(",", "") / "folder"
        if not place.exists():
            readers.make(folder, name)
            shutil.copytree(place, place.with_name("whole"))
        restore(place.with_name("whole"), place)
        treasure = hostile_files.make_outside(outside)
        done = OF_FOLDERS[part](place, outside, draw)
        if part != "pickles":
            readers.READERS[name].again(place)
        reader = readers.READERS[name]
        ended = isolated(reading(reader, place), seconds=reader.seconds, memory=MEMORY, terminal=part == "escapes")
        yield f"{name}: {done}", "refused" if ended.status else "read", _harm(ended, outside, treasure, part)


def _harm(ended: Ended, outside: Path, treasure: dict[str, bytes], part: str) -> str | None:
    """What an attack achieved."""
    if hostile_files.canary_sang(outside):
        return "code from a file ran"
    if hostile_files.contents(outside) != treasure:
        return "a file outside was changed"
    if hostile_files.SECRET in ended.text + ended.output:
        return "a file outside was read and shown"
    if ended.peak > PEAK + hostile_files.inherited():
        return f"took {ended.peak >> 20} MB"
    if part == "escapes" and (steering := hostile_files.steering(ended.text + ended.output)):
        return f"steers the terminal: {steering!r}"
    return complaint(ended)


def run(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return main(campaign, __doc__, 10, argv, parts=PARTS)


if __name__ == "__main__":
    sys.exit(run())
