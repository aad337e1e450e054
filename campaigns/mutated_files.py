"""Attacks on readers: one file of a folder is changed, the folder read, and the file restored."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from campaigns.isolated import complaint, isolated, refusing
from campaigns.mutations import mutated
from campaigns.readers import READERS, Reader

MEMORY = 2 << 30
_NOT_READ = {"lock", "loss.png", ".polysketch-lock", "README.md"}


def attacks(folder: Path, name: str, count: int, draw: random.Random) -> Iterator[tuple[str, str | None, str]]:
    """So many changed files of one reader: which file, what is wrong, and what came of it.

    Args:
        folder: of whole files, see `readers.make`.
        name: of the reader.
        count: of attacks.
        draw: what chooses.
    """
    reader = READERS[name]
    whole = folder.with_name("whole")
    if not whole.exists():
        shutil.copytree(folder, whole)
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    paths = [path for path in paths if path.name not in _NOT_READ]
    for _ in range(count):
        path, seed = draw.choice(paths), draw.randrange(2**63)
        (folder / path).write_bytes(mutated((whole / path).read_bytes(), path.name, random.Random(seed)))
        reader.again(folder)
        ended = isolated(reading(reader, folder), seconds=reader.seconds, memory=MEMORY)
        outcome = "refused" if ended.status else "read"
        yield f"{name}: {path}, mutation {seed}", complaint(ended), outcome
        restore(whole, folder)


def reading(reader: Reader, folder: Path) -> Callable[[], int]:
    """The call of a reader, that says a refusal as a command does."""
    status: list[Any] = []
    call = refusing(lambda: status.append(reader.read(folder)))
    return lambda: call() or (status[0] if isinstance(status[0], int) else 0)


def restore(whole: Path, folder: Path) -> None:
    """Make a folder again what it was, and delete what was made of it."""
    for made in folder.parent.glob("folder-new*"):
        shutil.rmtree(made) if made.is_dir() else made.unlink()
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)
