"""The texts of studies: source code that is on every machine, and books out of POLYSKETCH_DATA. Prepared once."""

from __future__ import annotations

import csv
import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polysketch.data import PreparedData, ReadOptions, prepare
from polysketch.data.description import DESCRIPTION_FILE
from polysketch.studies import kept
from polysketch.studies.in_turn import one_at_a_time

_SHORTEST = 2_000  # bytes of a file: in shorter ones nothing repeats from afar
_FEW_SHARE = 0.25  # of few files, that no split is empty


def prepared_once(
    place: Path, name: str, told: Mapping[str, Any], make: Callable[[Path], PreparedData]
) -> PreparedData:
    """The prepared text in `place` that has been made by these settings, or a new one.

    Where another process is making one, this one waits.

    Args:
        place: a folder that the runs of a study share.
        name: of the text.
        told: what the text depends on; JSON values.
        make: gets the folder to make.
    """
    out = place / f"{name}-{kept.digest(told)}"
    if not _is_prepared(out):
        with one_at_a_time(place):
            if not _is_prepared(out):
                return make(out)
    return PreparedData.open(out)


def _is_prepared(folder: Path) -> bool:
    return (folder / DESCRIPTION_FILE).is_file()


def source_code(tokenizer: str, place: Path, *, files: int | None = None) -> PreparedData:
    """Python's standard library.

    It is on every machine that runs Python, and it repeats its names from afar: that is what a far field is for.

    Args:
        tokenizer: specification of the tokenizer that is trained on it.
        place: folder for the prepared text, see `prepared_once`.
        files: take only so many, and more of them to validate and test; None takes all.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found = (path for path in sorted(library.rglob("*.py")) if not _left_out(path.relative_to(library)))
    sources = [path for path in found if path.stat().st_size >= _SHORTEST][:files]
    shares: dict[str, Any] = {} if files is None else {"validation_share": _FEW_SHARE, "test_share": _FEW_SHARE}
    told = {"tokenizer": tokenizer, "files": [str(path) for path in sources]}
    return prepared_once(place, "code", told, lambda out: prepare(sources, tokenizer, out, **shares))


def _left_out(path: Path) -> bool:
    """Other people's packages, tests and their data, and tables of characters."""
    return bool({"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings"} & set(path.parts))


def books(tokenizer: str, place: Path, *, per_split: int | None = None, cut_text: int | None = None) -> PreparedData:
    """The books of POLYSKETCH_DATA, in their own splits.

    Args:
        tokenizer: specification of the tokenizer that is trained on them.
        place: folder for the prepared text, see `prepared_once`.
        per_split: take only so many books of each split; None takes all.
        cut_text: cut them into documents of about so many bytes; None leaves them whole.

    Raises:
        FileNotFoundError: POLYSKETCH_DATA is not set, or has no books.
    """
    table, by_split = book_files()
    sources = [path for paths in by_split.values() for path in paths[:per_split]]
    told = {"tokenizer": tokenizer, "per_split": per_split, "cut_text": cut_text}
    options = ReadOptions(cut_text=cut_text)
    return prepared_once(
        place, "books", told, lambda out: prepare(sources, tokenizer, out, split_table=table, options=options)
    )


def book_files() -> tuple[Path, dict[str, Sequence[Path]]]:
    """The table that splits the books, and their files by split.

    Raises:
        FileNotFoundError: POLYSKETCH_DATA is not set, or has no books.
    """
    folder = os.environ.get("POLYSKETCH_DATA", "")
    table = Path(folder) / "books" / "books.tsv"
    if not folder or not table.is_file():
        found = f"no file {table}" if folder else "that it is not set"
        raise FileNotFoundError(f"expected books/books.tsv in the folder that POLYSKETCH_DATA names, found {found}")
    by_split: dict[str, list[Path]] = {}
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            by_split.setdefault(row["split"], []).append(table.parent / row["file"])
    return table, dict(by_split)
