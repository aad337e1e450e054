"""Which token ends a document: the one asked for, else the one a model folder declares, else the one usual name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysketch.storage.outside import read_json

# What tokenizers that are trained here call the token that ends a document.
END_OF_TEXT = "<|endoftext|>"
# What others call it. Ends of a turn or of a sentence pair are something else.
USUAL_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
# Files of a transformers model folder that name it, the more specific first, and under which key.
DECLARING_FILES = {
    "tokenizer_config.json": "eos_token",
    "special_tokens_map.json": "eos_token",
    "generation_config.json": "eos_token_id",
    "config.json": "eos_token_id",
}
_LISTED = 12


def usual_end_of_text(vocabulary: Mapping[str, int], special: Mapping[str, int]) -> list[str]:
    """The usual names that a tokenizer has: among its special tokens, or if there are none, among all."""
    return [name for name in USUAL_NAMES if name in special] or [name for name in USUAL_NAMES if name in vocabulary]


def choose_end_of_text(
    asked: str | int | None, vocabulary: Mapping[str, int], special: Mapping[str, int], origin: str
) -> int:
    """The id of the token that ends a document.

    Args:
        asked: The token or its id; None for the one usual name.
        vocabulary: All tokens and their ids.
        special: The special ones among them.
        origin: What the tokenizer is read from, for messages.

    Raises:
        ValueError: There is no such token; or none was asked for and the tokenizer has none of the usual names, or
            several.
    """
    if isinstance(asked, int):
        if asked not in vocabulary.values():
            raise ValueError(f"expected the end-of-text token {asked} in {origin}, found no such id")
        return asked
    if asked is not None:
        return _id_of(asked, vocabulary, origin)
    found = usual_end_of_text(vocabulary, special)
    if len(found) == 1:
        return vocabulary[found[0]]
    known = ", ".join(found) if found else f"none; its special tokens are {', '.join([*special][:_LISTED]) or 'none'}"
    raise ValueError(
        f"expected in {origin} one of the tokens {', '.join(USUAL_NAMES)} to end documents with, found {known}: "
        "name the token with --end-of-text"
    )


def declared_end_of_text(folder: Path) -> str | int | None:
    """The end-of-text token that a transformers model folder declares, by name or id; None when it says nothing.

    Raises:
        ValueError: A file is damaged, or the first one that says anything names several.
    """
    for name, key in DECLARING_FILES.items():
        declared = _value(folder / name, key)
        if isinstance(declared, list) and len(declared) > 1:
            raise ValueError(
                f"expected one {key} in {folder / name}, found {len(declared)}: {declared}; name the token that ends a "
                "document with --end-of-text"
            )
        if declared not in (None, []):
            return _token(declared[0] if isinstance(declared, list) else declared, key, folder / name)
    return None


def _token(declared: Any, key: str, path: Path) -> str | int:
    if isinstance(declared, bool) or not isinstance(declared, str | int):
        raise ValueError(f"expected a token or its id as {key} in {path}, found {type(declared).__name__}")
    return declared


def _value(path: Path, key: str) -> Any:
    if not path.is_file():
        return None
    contents = read_json(path)
    value = contents.get(key) if isinstance(contents, dict) else None
    return value.get("content") if isinstance(value, dict) else value


def _id_of(token: str, vocabulary: Mapping[str, int], origin: str) -> int:
    if token not in vocabulary:
        near = difflib.get_close_matches(token, vocabulary, n=3, cutoff=0.5)
        raise ValueError(
            f"expected the end-of-text token {token!r} in {origin}, found no such token"
            + (f": did you mean {' or '.join(map(repr, near))}?" if near else "")
        )
    return vocabulary[token]
