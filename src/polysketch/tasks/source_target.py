"""Sources and the targets that are to be written, out of local files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polysketch.tasks.answered import AnsweredRows, SequenceAnswers
from polysketch.tasks.batch import BEGINNING
from polysketch.tasks.lines import columns, layout_of, two_fields, two_named_columns
from polysketch.tasks.symbols import symbol_encoding


class Example(NamedTuple):
    """A source and its target, and where they stand."""

    source: str
    target: str
    place: str


def sequences_to_write(
    sources: dict[str, Sequence[Path]],
    encode: Callable[[str], Sequence[int]] | None,
    vocab_size: int = 0,
    *,
    end: int = BEGINNING,
    max_tokens: int | None = None,
    source_field: str = "source",
    target_field: str = "target",
    alphabet: str = "",
) -> SequenceAnswers:
    """Sources, each with the target that is to be written.

    Args:
        sources: by split, "train" at least, files: JSON Lines of objects with the two fields, which are texts;
            .csv tables whose heading has both; or tables of two columns apart by a tab, a source and then a target,
            perhaps under a line that says "source" and "target". Each file may be compressed (.gz).
        encode: a tokenizer's. None: sources and targets are symbols apart by spaces, and get ids from 1 on in the order
            of the alphabet.
        vocab_size: number of ids of `encode`.
        end: the token behind every target, by which a model tells that it has written all.
        max_tokens: sources and targets with more are refused, for what is cut off would not be learned.
        source_field, target_field: of JSON Lines and .csv tables.
        alphabet: what the ids of `encode` stand for, for instance the tokenizer's sha256.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another layout, a symbol of another split that training lacks, an empty or too long text, no row;
            the message says where.
    """
    found = {
        split: [each for path in paths for each in _examples(Path(path), source_field, target_field)]
        for split, paths in sources.items()
    }
    if encode is None:
        texts = (text for each in found["train"] for text in (each.source, each.target))
        encode, vocab_size, alphabet = symbol_encoding(texts)
    splits = {split: _rows(examples, encode, end, max_tokens) for split, examples in found.items()}
    return SequenceAnswers(splits, vocab_size, (), alphabet, end)


def _rows(examples: list[Example], encode: Callable[[str], Sequence[int]], end: int, most: int | None) -> AnsweredRows:
    encoded = [[_ids(text, each.place, encode, most) for text in (each.source, each.target)] for each in examples]
    return AnsweredRows.of([source for source, _ in encoded], [np.append(target, end) for _, target in encoded])


def _ids(text: str, place: str, encode: Callable[[str], Sequence[int]], most: int | None) -> np.ndarray:
    try:
        ids = np.asarray(encode(text), dtype=np.int64)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    if not len(ids):
        raise ValueError(f"{place}: expected a text of at least one token, found {text!r}")
    if most is not None and len(ids) > most:
        raise ValueError(f"{place}: expected at most {most} tokens, as --max-tokens says, found {len(ids)}: give more")
    return ids


def _examples(path: Path, source_field: str, target_field: str) -> Iterator[Example]:
    if layout_of(path) in (".jsonl", ".ndjson"):
        return _of_json_lines(path, source_field, target_field)
    if layout_of(path) in (".tsv", ".tab"):
        return _of_table(path)
    if layout_of(path) == ".csv":
        rows = two_named_columns(path, source_field, target_field)
        return (Example(source, target, place) for place, source, target in rows)
    raise ValueError(f"expected a .jsonl, .tsv or .csv file, found {path}")


def _of_json_lines(path: Path, source_field: str, target_field: str) -> Iterator[Example]:
    for place, source, target in two_fields(path, source_field, target_field):
        if not isinstance(source, str) or not isinstance(target, str):
            kinds = f"{type(source).__name__} and {type(target).__name__}"
            raise ValueError(f"{place}: expected two texts, found {kinds}")
        yield Example(source, target, place)


def _of_table(path: Path) -> Iterator[Example]:
    for number, (place, cells) in enumerate(columns(path, 2, "two columns apart by a tab")):
        if number == 0 and [cell.lower() for cell in cells] == ["source", "target"]:
            continue
        yield Example(cells[0], cells[1], place)
