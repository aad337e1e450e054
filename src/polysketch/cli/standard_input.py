"""Standard input as a file: what reads its sources more than once cannot read a pipe."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["STANDARD_INPUT", "standard_input_kept"]

STANDARD_INPUT = "-"
_PIECE = 1 << 20


@contextlib.contextmanager
def standard_input_kept(sources: Sequence[str], out: Path, format: str) -> Iterator[tuple[str, ...]]:
    """Keep standard input in a file beside `out` while something is made of it, where a source is `-`.

    The file is deleted at the end, and stays after a failure or a kill: the same command, given the same text again,
    takes it for the file that it has read a part of.

    Args:
        sources: names of sources.
        out: the folder to be made.
        format: of the text, see `ReadOptions`; plain text where it is auto.

    Yields:
        The sources, with the file's path in the place of `-`.
    """
    if STANDARD_INPUT not in sources:
        yield tuple(sources)
        return
    suffix = "txt" if format in ("auto", "text") else format
    kept = out.with_name(f"{out.name}.stdin.{suffix}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    # A name that nobody can guess: in a folder that others may write to, a link might be there.
    descriptor, name = tempfile.mkstemp(prefix=f".{kept.name}.", dir=kept.parent)
    fresh = Path(name)
    try:
        with open(descriptor, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, _PIECE)
        if kept.is_symlink() or not kept.exists() or _digest(kept) != _digest(fresh):
            fresh.replace(kept)
    finally:
        fresh.unlink(missing_ok=True)
    yield tuple(str(kept) if source == STANDARD_INPUT else source for source in sources)
    kept.unlink()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
