"""Words with a label each, out of local files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polysketch.targets import NO_TARGET
from polysketch.tasks.answered import AnsweredRows, SequenceAnswers
from polysketch.tasks.lines import layout_of, ordered_names, placed_lines, two_fields


class Sentence(NamedTuple):
    """Words with their labels, and where they stand."""

    words: list[str]
    labels: list[str]
    place: str


def labelled_words(
    sources: dict[str, Sequence[Path]],
    encode: Callable[[str], Sequence[int]],
    vocab_size: int,
    *,
    max_tokens: int | None = None,
    words_field: str = "tokens",
    labels_field: str = "labels",
    alphabet: str = "",
) -> SequenceAnswers:
    """Sentences with a label for each word. The first token of a word has its label; the others are not asked for.

    Args:
        sources: by split, "train" at least, files: JSON Lines of objects with a list of words and a list of labels, as
            data sets of Hugging Face are exported; labels are texts, or whole numbers, of which -100 asks nothing. Or
            CoNLL's columns (.conll, .txt, .tsv): a word first and its label last, between spaces or tabs, a blank line
            behind each sentence. Each file may be compressed (.gz).
        encode: a tokenizer's. Each word is encoded with a space before it.
        vocab_size: number of ids of `encode`.
        max_tokens: longer sentences are refused, for words that are cut off would not be asked for.
        words_field, labels_field: of JSON Lines.
        alphabet: what the ids of `encode` stand for, for instance the tokenizer's sha256.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another layout, a label of another split that training lacks, a sentence without a label or of too
            many tokens, no sentence; the message says where.
    """
    found = {
        split: [each for path in paths for each in _sentences(Path(path), words_field, labels_field)]
        for split, paths in sources.items()
    }
    names = ordered_names({label for sentence in found["train"] for label in sentence.labels} - {_NOT_ASKED})
    encode = functools.cache(encode)  # words come again
    splits = {split: _rows(sentences, names, encode, max_tokens) for split, sentences in found.items()}
    if not names:
        raise ValueError(f"expected sentences with labels in {', '.join(map(str, sources['train']))}, found none")
    return SequenceAnswers(splits, vocab_size, names, alphabet)


_NOT_ASKED = str(NO_TARGET)


def _rows(
    sentences: list[Sentence], names: list[str], encode: Callable[[str], Sequence[int]], most: int | None
) -> AnsweredRows:
    ids, answers = [], []
    numbers = {name: number for number, name in enumerate(names)} | {_NOT_ASKED: NO_TARGET}
    for words, labels, place in sentences:
        tokens = [encode(f" {word}") for word in words]
        for word, label, of_word in zip(words, labels, tokens, strict=True):
            if label not in numbers:
                raise ValueError(f"{place}: expected a label of training, {', '.join(names)}, found {label!r}")
            if not of_word:
                raise ValueError(f"{place}: expected words of at least one token, found {word!r}")
        ids.append(np.array([token for of_word in tokens for token in of_word], dtype=np.int64))
        if most is not None and len(ids[-1]) > most:
            raise ValueError(
                f"{place}: expected at most {most} tokens, as --max-tokens says, found {len(ids[-1])}: give more, or "
                "cut the sentence in two"
            )
        answers.append(np.full(len(ids[-1]), NO_TARGET))
        first = np.cumsum([0, *map(len, tokens[:-1])])
        answers[-1][first] = [numbers[label] for label in labels]
        if (answers[-1] == NO_TARGET).all():
            raise ValueError(f"{place}: expected at least one label, found none")
    return AnsweredRows.of(ids, answers)


def _sentences(path: Path, words_field: str, labels_field: str) -> Iterator[Sentence]:
    if layout_of(path) in (".jsonl", ".ndjson"):
        return _of_json_lines(path, words_field, labels_field)
    if layout_of(path) in (".conll", ".txt", ".tsv"):
        return _of_columns(path)
    raise ValueError(f"expected a .jsonl file, or CoNLL's columns in a .conll, .txt or .tsv file, found {path}")


def _of_json_lines(path: Path, words_field: str, labels_field: str) -> Iterator[Sentence]:
    for place, words, labels in two_fields(path, words_field, labels_field):
        if not _is_list_of(words, str) or not _is_list_of(labels, str | int) or len(words) != len(labels):
            raise ValueError(f"{place}: expected a list of words and a list of as many labels, found others")
        yield Sentence(words, list(map(str, labels)), place)


def _is_list_of(value: object, kind: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, kind) for each in value)  # type: ignore[arg-type]


_BEGINNING_OF_DOCUMENT = "-DOCSTART-"  # a line of its own in CoNLL's files


def _of_columns(path: Path) -> Iterator[Sentence]:
    words, labels, begun = [], [], ""
    lines = [*placed_lines(path), (str(path), "")]
    if any("\t" in line.strip() for _, line in lines):  # where tabs stand between columns, a line without is a comment
        lines = [(place, line) for place, line in lines if "\t" in line or not line.startswith("#")]
    for place, line in lines:
        cells = line.strip().split("\t") if "\t" in line.strip() else line.split()
        if cells and cells[0] != _BEGINNING_OF_DOCUMENT:
            if len(cells) == 1:
                raise ValueError(f"{place}: expected a word and its label, found {line.strip()[:60]!r} alone")
            begun = begun or place
            words.append(cells[0])
            labels.append(cells[-1])
        elif words:
            yield Sentence(words, labels, begun)
            words, labels, begun = [], [], ""
