"""From the paths that a user names to the files to read, in an order that depends on nothing but their names."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polysketch.data.corpus.document import ReadOptions
from polysketch.data.corpus.readers import READERS, TEXT_SUFFIXES, Reader, reader_of
from polysketch.data.corpus.recipes import RECIPES
from polysketch.data.splits import SPLIT_NAMES, SplitTable


@dataclass(frozen=True)
class SourceFile:
    """A file to read.

    Attributes:
        path: Where it is.
        reader: How it is read.
        split: The split its folder or the table gives, or None where a hash decides.
    """

    path: Path
    reader: Reader
    split: str | None


def source_files(source: str, options: ReadOptions, table: SplitTable | None) -> list[SourceFile]:
    """The files of one path.

    A folder is searched recursively, in the order of the names, for files with a known suffix; names that begin with a
    dot are passed over. A folder with a subfolder ``train`` and one of ``validation`` or ``test`` (or another name of
    ``SPLIT_NAMES``) is taken to be split by these.

    Raises:
        FileNotFoundError: There is nothing at the path.
        ValueError: A file has an unknown suffix or is empty, a folder has no file to read, a file lies outside the
            split subfolders, or a file is missing from the table.
    """
    path = Path(source)
    if not source:
        raise ValueError("expected a file or folder to read, found an empty name: is a variable of the shell unset?")
    if not path.exists():
        raise FileNotFoundError(
            f"expected a file or folder to read, found nothing at {path}; datasets by name: {', '.join(RECIPES)}"
        )
    files = _of_folder(path, options) if path.is_dir() else [_of_file(path, options)]
    if table is None:
        return files
    texts = [file for file in files if file.path.resolve() != table.path.resolve()]
    return [SourceFile(file.path, file.reader, table.split_of(file.path)) for file in texts]


def _of_file(path: Path, options: ReadOptions) -> SourceFile:
    reader = reader_of(path, options.format)
    if reader is None:
        raise ValueError(
            f"expected a file of a known kind ({_known_suffixes()}), found {path}: --format says what it holds"
        )
    if path.stat().st_size == 0:
        raise ValueError(f"expected text, found an empty file: {path}")
    return SourceFile(path, reader, None)


def _of_folder(folder: Path, options: ReadOptions) -> list[SourceFile]:
    relatives = [name for name in _walk(folder) if not any(fnmatch.fnmatch(name, rule) for rule in options.exclude)]
    readable = [(name, reader) for name in relatives if (reader := reader_of(Path(name), options.format)) is not None]
    if not readable:
        raise ValueError(
            f"expected files of a known kind ({_known_suffixes()}) in {folder}, found none among {len(relatives)} files"
        )
    split_by_folder = _is_split_by_folder(folder)
    return [
        SourceFile(folder / name, reader, _split_of_folder(folder, name) if split_by_folder else None)
        for name, reader in readable
    ]


def _walk(folder: Path) -> list[str]:
    """Relative paths of all files, sorted by their parts; links to folders are followed, but never round and round."""
    found: list[tuple[str, ...]] = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name != "__pycache__" and not _leads_back(folder, Path(parent) / name)
        ]
        parts = Path(parent).relative_to(folder).parts
        found += [(*parts, name) for name in names if not name.startswith(".")]
    return ["/".join(parts) for parts in sorted(found)]


def _leads_back(folder: Path, place: Path) -> bool:
    """Whether a link below `folder` names a folder above it, or one that the way to the link goes through."""
    if not place.is_symlink():
        return False
    target = place.resolve()
    above = [place.parent, *place.parent.parents]
    through = above[: above.index(folder) + 1]
    return folder.resolve().is_relative_to(target) or target in {each.resolve() for each in through}


def _is_split_by_folder(folder: Path) -> bool:
    # A folder `test` alone is no split: many trees of source code have one.
    present = {split for name, split in SPLIT_NAMES.items() if (folder / name).is_dir()}
    return "train" in present and len(present) > 1


def _split_of_folder(folder: Path, name: str) -> str:
    first, slash, _ = name.partition("/")
    if not slash or first not in SPLIT_NAMES:
        raise ValueError(
            f"expected every file of {folder} inside its split subfolders, found {name} outside: move it, or leave it "
            f"out with --exclude '{name}'"
        )
    return SPLIT_NAMES[first]


def _known_suffixes() -> str:
    special: Iterator[str] = (suffix for suffix in READERS if suffix not in TEXT_SUFFIXES)
    return f"{', '.join(TEXT_SUFFIXES[:4])} and other text, {', '.join(special)}; text and JSON lines also with .gz"
