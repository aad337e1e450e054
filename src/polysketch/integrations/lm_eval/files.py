"""Documents of evaluation tasks in local files: .json and .jsonl, as they are or compressed by gzip."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polysketch.data.compressed import read_bytes
from polysketch.storage.outside import decoded

__all__ = ["SUFFIXES", "find_file", "read_documents", "read_json"]

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")


def find_file(folders: Sequence[Path], stems: Sequence[str]) -> Path | None:
    """The first file of one of these names, without suffix, in one of these folders; None if there is none."""
    for folder in folders:
        for stem in stems:
            for suffix in SUFFIXES:
                file = folder / (stem + suffix)
                if file.is_file():
                    return file
    return None


def read_json(file: Path) -> Any:
    """The one JSON value of a file.

    Raises:
        ValueError: the file is damaged.
    """
    return _decoded(_read_text(file), file)


def read_documents(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file: one a line, or a JSON list, or a JSON object with a list `examples` or `data`.

    Returns:
        Each with where it stands, for a message: "line 3" (empty lines count, and are skipped), or "document 3".

    Raises:
        ValueError: the file is damaged, or holds no objects.
    """
    is_lines = file.name.removesuffix(".gz").endswith(".jsonl")
    documents = _read_lines(file) if is_lines else _read_list(file)
    if not documents:
        raise ValueError(f"expected a list of objects in {file}, found nothing")
    for place, document in documents:
        if not isinstance(document, dict):
            raise ValueError(f"expected an object in {place} of {file}, found {type(document).__name__}")
    return documents


def _read_list(file: Path) -> list[tuple[str, Any]]:
    """The values of a JSON list."""
    documents = read_json(file)
    if isinstance(documents, dict):
        documents = documents.get("examples", documents.get("data"))
    if not isinstance(documents, list):
        raise ValueError(f"expected a list of objects in {file}, found none")
    return [(f"document {number}", document) for number, document in enumerate(documents, start=1)]


def _read_lines(file: Path) -> list[tuple[str, Any]]:
    """One JSON value a line; empty lines are skipped."""
    documents = []
    for number, line in enumerate(_read_text(file).split("\n"), start=1):
        if line.strip():
            documents.append((f"line {number}", _decoded(line, f"{file}, line {number}")))
    return documents


def _read_text(file: Path) -> str:
    """The text of a file, decompressed.

    Raises:
        ValueError: it is not UTF-8, or not gzip although its name says so, or more than a gigabyte.
    """
    try:
        return read_bytes(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected text in {file}, found something else: {error}") from None


def _decoded(text: str, origin: str | Path) -> Any:
    """The value of JSON, whose texts UTF-8 can hold: escapes may spell half a character."""
    value = decoded(text, origin)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError) as error:
            raise ValueError(f"expected text in {origin} that UTF-8 can hold, found other: {error}") from None
    return value
