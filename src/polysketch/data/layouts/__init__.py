"""Token files that other programs made, read where they lie: of Megatron-LM, nanoGPT and llm.c.

=============  ============================================  ======================================================
found          read as                                       documents
=============  ============================================  ======================================================
``.idx``       Megatron-LM, with the ``.bin`` of that name   what the index says, and where an end of text stands
``.bin``       llm.c, where its header says so               where an end of text stands
``.bin``       nanoGPT: uint16 and nothing else              where an end of text stands
=============  ============================================  ======================================================
"""

from __future__ import annotations

from pathlib import Path

from polysketch.data.layouts.bare import read_bare
from polysketch.data.layouts.megatron import read_megatron
from polysketch.data.tokens import TokenFile

INDEX, TOKENS = ".idx", ".bin"


def holds_foreign_files(path: Path) -> bool:
    """Whether `path` names token files of others: a file, a folder with some, or what the names of some begin with."""
    return path.is_file() or bool(_named(path))


def read_layout(path: Path) -> tuple[str, list[TokenFile]]:
    """The token files that a path names, sorted by name.

    Args:
        path: A folder; a file; or a prefix, which is what the names of some files begin with. A prefix that is the
            whole name of a ``.bin`` but for the suffix means that file alone.

    Returns:
        Who made them, and the files.

    Raises:
        FileNotFoundError: There are none, or a half of Megatron's pairs is missing.
        ValueError: A file is of another layout, or damaged; or files of several layouts lie together.
    """
    if path.is_file() and path.suffix not in (INDEX, TOKENS):
        raise ValueError(
            f"expected a folder made by polysketch prepare, or token files of others (.bin, Megatron-LM's with .idx), "
            f"found {path}: turn text into tokens by polysketch prepare"
        )
    names = _named(path)
    if not names:
        raise FileNotFoundError(f"expected token files (.bin, Megatron-LM's with .idx) at {path}, found none")
    indexed = {name.with_suffix("") for name in names if name.suffix == INDEX}
    tokens = {name.with_suffix("") for name in names if name.suffix == TOKENS}
    if not indexed:
        return read_bare(sorted(name.with_suffix(TOKENS) for name in tokens))
    if indexed != tokens:
        lone = min(indexed ^ tokens)
        lacking = TOKENS if lone in indexed else INDEX
        raise FileNotFoundError(
            f"expected a .bin and an .idx of each name, as Megatron-LM writes them, found no {lone}{lacking}"
        )
    return "Megatron-LM", [read_megatron(lone) for lone in sorted(indexed)]


def _named(path: Path) -> list[Path]:
    """The .bin and .idx files that a path names."""
    if path.is_dir():
        return [found for found in path.iterdir() if found.suffix in (INDEX, TOKENS) and not _is_hidden(found)]
    whole = path.with_suffix("") if path.suffix in (INDEX, TOKENS) and path.is_file() else path
    pair = [whole.with_name(whole.name + suffix) for suffix in (INDEX, TOKENS)]
    if any(found.is_file() for found in pair):
        return [found for found in pair if found.is_file()]
    if not path.parent.is_dir():
        return []
    beside = path.parent.iterdir()
    return [found for found in beside if found.suffix in (INDEX, TOKENS) and found.name.startswith(path.name)]


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")
