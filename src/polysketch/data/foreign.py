"""Token files of others as splits, with a description like that of a prepared folder; nothing is copied."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from polysketch.data.description import (
    SPLITS,
    DataDescription,
    ShardDescription,
    SplitDescription,
    TokenizerDescription,
)
from polysketch.data.documents import document_ends
from polysketch.data.layouts import read_layout
from polysketch.data.splits import SPLIT_NAMES
from polysketch.data.tokenization import BytesTokenizer, TokenIds, TokenizerLike, load_tokenizer
from polysketch.data.tokens import ShardedTokens, TokenFile

# Where files do not say by their names which split they are: the first 98 % train, then validation, then test.
BEFORE_VALIDATION, BEFORE_TEST = 0.98, 0.99
# How far the end of a document is searched for after those places.
SEARCHED_TOKENS = 2**22
# What is read of a file to tell it from another of the same name and size, at its beginning and at its end.
SAMPLE_BYTES = 2**16


def read_foreign(path: Path, tokenizer: TokenizerLike) -> tuple[DataDescription, dict[str, ShardedTokens]]:
    """Describe and map token files that others made.

    Files are of the split whose name is a word of theirs (``fineweb_val_000000.bin``); if none is, the first 98 % of
    the tokens are for training, then one each for validation and test, cut where a document ends. Files of a split
    follow one another in the order of their names.

    Args:
        path: A folder, a file, or what the names of some files begin with.
        tokenizer: What made the ids, as the user says.

    Returns:
        The description, and the tokens by split, which refuse ids outside the vocabulary as they are read.

    Raises:
        FileNotFoundError: There are no such files.
        ValueError: They are of another layout, damaged, or not clear about their splits.
    """
    layout, files = read_layout(path)
    vocab_size = tokenizer.vocab_size
    named = _by_name(files)
    splits = (
        {name: ShardedTokens(found, vocab_size=vocab_size) for name, found in named.items()}
        if named
        else _cut(ShardedTokens(files, vocab_size=vocab_size), tokenizer.end_of_text)
    )
    folder = path if path.is_dir() else path.parent
    digests = {file.path: _sample_sha256(file.path) for file in files}
    description = DataDescription(
        tokenizer=TokenizerDescription.of(tokenizer),
        dtype=files[0].dtype.name,
        splits={name: _described(tokens, folder, digests) for name, tokens in splits.items()},
        layout=layout,
    )
    return description, splits


def _by_name(files: Sequence[TokenFile]) -> dict[str, list[TokenFile]]:
    """Files by the split in their names; {} where there is none in any."""
    found: dict[str, list[TokenFile]] = {name: [] for name in SPLITS}
    without: list[TokenFile] = []
    for file in files:
        words = {word for word in re.split(r"[^a-z]+", file.path.stem.lower()) if word in SPLIT_NAMES}
        splits = {SPLIT_NAMES[word] for word in words}
        if len(splits) > 1:
            raise ValueError(f"expected the name of one split in that of {file.path}, found {', '.join(sorted(words))}")
        (found[splits.pop()] if splits else without).append(file)
    named = {name: those for name, those in found.items() if those}
    if named and without:
        raise ValueError(
            f"expected the split (train, val, test) in the names of all token files or of none, found none in "
            f"{without[0].path.name} and {next(iter(named))} in {next(iter(named.values()))[0].path.name}"
        )
    return named


def _cut(tokens: ShardedTokens, end_of_text: int) -> dict[str, ShardedTokens]:
    """Training, validation and test, in this order; training alone where there is too little for three."""
    inner = [_next_document(tokens, share, end_of_text) for share in (BEFORE_VALIDATION, BEFORE_TEST)]
    bounds = [0, *inner, len(tokens)]
    parts = dict(zip(SPLITS, itertools.pairwise(bounds), strict=True))
    if any(stop - start < 2 for start, stop in parts.values()):
        return {"train": tokens}
    return {name: tokens.between(start, stop) for name, (start, stop) in parts.items()}


def _next_document(tokens: ShardedTokens, share: float, end_of_text: int) -> int:
    """Where a document begins after a share of the tokens; just there where none does for long."""
    start = int(len(tokens) * share)
    ends = document_ends(tokens, start, min(start + SEARCHED_TOKENS, len(tokens)), end_of_text)
    return int(ends[0]) + 1 if len(ends) else start


def _described(tokens: ShardedTokens, folder: Path, digests: dict[Path, str]) -> SplitDescription:
    shards = [
        ShardDescription(str(file.path.relative_to(folder)), file.tokens, digests[file.path], file.offset)
        for file in tokens.files
    ]
    return SplitDescription(len(tokens), sum(file.num_documents for file in tokens.files), 0, tuple(shards))


def _sample_sha256(path: Path) -> str:
    """Of a file's size, beginning and end: the whole may be terabytes."""
    with path.open("rb") as file:
        size = path.stat().st_size
        beginning = file.read(SAMPLE_BYTES)
        file.seek(max(size - SAMPLE_BYTES, 0))
        return hashlib.sha256(f"{size}\n".encode() + beginning + file.read(SAMPLE_BYTES)).hexdigest()


def tokenizer_of_ids(
    tokenizer: str | Path | None, vocab_size: int | None, end_of_text: str | None
) -> TokenizerLike | None:
    """What made the ids of token files, as the user says; None where nothing is said.

    Args:
        tokenizer: ``bytes``, or a file or folder as ``load_tokenizer`` takes it.
        vocab_size: Number of ids, in place of a tokenizer.
        end_of_text: The token that ends a document; beside a number of ids, its id.

    Raises:
        FileNotFoundError: There is no such tokenizer.
        ValueError: Both are given, or an end of text alone or with another meaning.
    """
    if vocab_size is not None:
        if tokenizer is not None:
            raise ValueError("expected --tokenizer or --vocab-size, found both")
        if end_of_text is not None and not end_of_text.isdecimal():
            raise ValueError(f"--end-of-text: expected an id beside --vocab-size, found {end_of_text!r}")
        return TokenIds(vocab_size, None if end_of_text is None else int(end_of_text))
    if tokenizer is None:
        if end_of_text is not None:
            raise ValueError("--end-of-text: expected --tokenizer or --vocab-size beside it, found neither")
        return None
    if str(tokenizer) == BytesTokenizer.kind:
        return BytesTokenizer()
    return load_tokenizer(tokenizer, end_of_text)
