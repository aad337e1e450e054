"""Classified rows out of local files of texts, pairs of texts and lists of symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from polysketch.data.compressed import read_bytes
from polysketch.tasks.base import Split
from polysketch.tasks.lines import columns, layout_of, ordered_names, two_fields, two_named_columns
from polysketch.tasks.stored import Classification, ClassifiedRows
from polysketch.tasks.stored_task import StoredTask
from polysketch.tasks.symbols import symbol_encoding


class Labelled(NamedTuple):
    """One text, or two, with the name of a class, and where they stand."""

    texts: tuple[str, ...]
    name: str
    place: str


_LEFT_OUT = ("(", ")")
# The parentheses around every entry in the files of ListOps say nothing new.
_WITHOUT_CLASS = "unsup"
# The folder of the Large Movie Review Dataset with reviews that nobody has classified.


def classified_texts(
    sources: dict[str, Sequence[Path]],
    encode: Callable[[str], Sequence[int]] | None,
    vocab_size: int = 0,
    *,
    max_tokens: int | None = None,
    text_field: str = "text",
    class_field: str = "label",
    alphabet: str = "",
) -> Classification:
    """Texts with their classes.

    Args:
        sources: by split, "train" at least, files and folders: JSON Lines of objects with the two fields; .csv tables
            whose heading has both; tables of two columns apart by a tab, a class and then a text, or in the order that
            a first line tells: of "label" or "class" and "text", "sentence" or "review", or of "Source" and "Target",
            as Long Range Arena has them; or a folder with a folder of text files for each class, as the Large Movie
            Review Dataset; its `unsup`, of reviews without a class, is left out. Each file may be compressed (.gz).
        encode: a tokenizer's. None: texts are symbols apart by spaces, and get ids from 1 on in the order of the
            alphabet; parentheses are left out.
        vocab_size: number of ids of `encode`.
        max_tokens: longer rows are cut.
        text_field, class_field: of JSON Lines and .csv tables.
        alphabet: what the ids of `encode` stand for, for instance the tokenizer's sha256.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another layout, an unknown class or symbol in another split, an empty text; the message says where.
    """
    found = {
        split: [row for path in paths for row in labelled_texts(Path(path), text_field, class_field)]
        for split, paths in sources.items()
    }
    names = ordered_names(row.name for row in found["train"])
    if encode is None:
        texts = (row.texts[0] for row in found["train"])
        encode, vocab_size, alphabet = symbol_encoding(texts, _symbols)
    splits = {split: _rows(rows, names, encode, max_tokens) for split, rows in found.items()}
    return Classification(splits, vocab_size, names, alphabet=alphabet)


def classified_pairs(
    sources: dict[str, Sequence[Path]],
    encode: Callable[[str], Sequence[int]],
    vocab_size: int,
    *,
    max_tokens: int | None = None,
    alphabet: str = "",
) -> Classification:
    """Pairs of texts with the class of each pair.

    Args:
        sources: by split, "train" at least, tables of five columns apart by tabs, without a heading: a class, two names
            that nothing is made of, and two texts. So are the files of Long Range Arena's retrieval,
            new_aan_pairs.train.tsv and the like. Each file may be compressed (.gz).
        encode, vocab_size, alphabet: of a tokenizer, as for `classified_texts`.
        max_tokens: longer documents are cut.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another layout, an unknown class in another split, an empty text; the message says where.
    """
    found = {split: [row for path in paths for row in _of_pairs(Path(path))] for split, paths in sources.items()}
    names = ordered_names(row.name for row in found["train"])
    splits = {split: _rows(rows, names, encode, max_tokens) for split, rows in found.items()}
    return Classification(splits, vocab_size, names, alphabet=alphabet, documents=2)


def _rows(
    rows: list[Labelled], names: list[str], encode: Callable[[str], Sequence[int]], most: int | None
) -> ClassifiedRows:
    if most is not None and most < 1:
        raise ValueError(f"--max-tokens: expected at least 1, found {most}")
    ids = []
    for row in rows:
        if row.name not in names:
            raise ValueError(f"{row.place}: expected a class of training, {', '.join(names)}, found {row.name!r}")
        for text in row.texts:
            try:
                ids.append(np.asarray(encode(text)[:most], dtype=np.int64))
            except ValueError as error:
                raise ValueError(f"{row.place}: {error}") from error
            if not len(ids[-1]):
                raise ValueError(f"{row.place}: expected a text of at least one token, found {text!r}")
    return ClassifiedRows.of(ids, [names.index(row.name) for row in rows])


def _symbols(text: str) -> list[str]:
    return [symbol for symbol in text.split() if symbol not in _LEFT_OUT]


def labelled_texts(path: Path, text_field: str = "text", class_field: str = "label") -> Iterator[Labelled]:
    """The texts of a file or a folder, with their classes; see `classified_texts`."""
    if not path.exists():
        raise FileNotFoundError(f"expected a file or a folder, found nothing at {path}")
    if path.is_dir():
        return _of_folder(path)
    if layout_of(path) in (".jsonl", ".ndjson"):
        return _of_json_lines(path, text_field, class_field)
    if layout_of(path) in (".tsv", ".tab"):
        return _of_table(path)
    if layout_of(path) == ".csv":
        rows = two_named_columns(path, text_field, class_field)
        return (Labelled((text,), name.strip(), place) for place, text, name in rows)
    raise ValueError(f"expected a .jsonl, .tsv or .csv file or a folder of classes, found {path}")


def _of_json_lines(path: Path, text_field: str, class_field: str) -> Iterator[Labelled]:
    for place, text, name in two_fields(path, text_field, class_field):
        if not isinstance(text, str) or not isinstance(name, str | int):
            raise ValueError(f"{place}: expected a text and a class, found {type(text).__name__} and {name!r}")
        yield Labelled((text,), str(name), place)


def _of_table(path: Path) -> Iterator[Labelled]:
    text_first = False
    for number, (place, cells) in enumerate(columns(path, 2, "two columns apart by a tab")):
        if number == 0 and (heading := _tells_text_first(cells)) is not None:
            text_first = heading
            continue
        text, name = cells if text_first else reversed(cells)
        yield Labelled((text,), name.strip(), place)


_OF_TEXTS, _OF_CLASSES = ("source", "text", "sentence", "review"), ("target", "label", "class")


def _tells_text_first(cells: list[str]) -> bool | None:
    """Whether a heading names texts before classes; None where the line is a row like any other."""
    first, second = (cell.strip().lower() for cell in cells)
    if first in _OF_TEXTS and second in _OF_CLASSES:
        return True
    return False if first in _OF_CLASSES and second in _OF_TEXTS else None


_FIVE = "five columns apart by tabs, a class, two names and two texts"


def _of_pairs(path: Path) -> Iterator[Labelled]:
    if not path.is_file():
        raise FileNotFoundError(f"expected a file, found none at {path}")
    for place, cells in columns(path, 5, _FIVE):
        yield Labelled((cells[3], cells[4]), cells[0].strip(), place)


def _of_folder(path: Path) -> Iterator[Labelled]:
    folders = (child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    classes = sorted(folder for folder in folders if folder.name != _WITHOUT_CLASS)
    if len(classes) < 2:
        raise ValueError(f"{path}: expected a folder for each of at least two classes, found {len(classes)}")
    for folder in classes:
        files = sorted(file for file in folder.iterdir() if layout_of(file) == ".txt" and file.is_file())
        if not files:
            raise ValueError(f"{folder}: expected text files (.txt) of a class, found none")
        for file in files:
            yield Labelled((read_bytes(file).decode("utf-8-sig", errors="replace"),), folder.name, str(file))


Stored = TypeVar("Stored", bound=StoredTask[Any])


def split_off(task: Stored, share: float, seed: int = 0, split: Split = "validation") -> Stored:
    """The same rows, a share of those of training moved to another split.

    Raises:
        ValueError: the task has that split, or nothing would remain.
    """
    rows = task.splits["train"]
    count = round(share * len(rows))
    if split in task.splits or not 0 < count < len(rows):
        raise ValueError(f"expected no {split} rows yet and a share that leaves some to train on, found {share}")
    order = np.random.default_rng([seed, len(rows)]).permutation(len(rows))
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    return task.of_splits({**task.splits, "train": rows.chosen(kept), split: rows.chosen(held)})
