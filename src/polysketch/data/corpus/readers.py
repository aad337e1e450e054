"""Readers of files, by suffix: each turns one open file into raw documents, one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from polysketch.data.compressed import open_bytes, plain_name
from polysketch.data.corpus.cutting import pieces_of_file
from polysketch.data.corpus.document import ReadOptions, decoded, text_of_row
from polysketch.extras import require

# Where a document comes from (file and row), and its text, decoded or not.
RawDocument = tuple[str, bytes | str]
Reader = Callable[[BinaryIO, str, ReadOptions], Iterator[RawDocument]]

PARQUET_ROWS = 256
# A line of JSON is in memory about five times at once.
LONGEST_LINE = 64_000_000  # bytes

TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".xml", ".css", ".srt", ".org", ".adoc"),
    *(".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js"),
    *(".ts", ".jsx", ".tsx", ".go", ".rs", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".swift", ".cs"),
    *(".sh", ".bash", ".sql", ".toml", ".cfg", ".ini", ".yaml", ".yml"),
)


def read_text(file: BinaryIO, origin: str, options: ReadOptions) -> Iterator[RawDocument]:
    """A plain text file: one document, or pieces of about ``options.cut_text`` bytes that end with a line."""
    if not options.cut_text:
        yield origin, file.read()
        return
    pieces = pieces_of_file(file, options.cut_text)
    yield origin, next(pieces, b"")  # an empty file is a document, to be counted
    for number, piece in enumerate(pieces, start=2):
        yield f"{origin} piece {number}", piece


def read_json_lines(file: BinaryIO, origin: str, options: ReadOptions) -> Iterator[RawDocument]:
    """A document for each line: a JSON object with a text field. Blank lines are passed over."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
        place = f"{origin}:{number}"
        if len(line) > LONGEST_LINE:
            raise ValueError(
                f"expected lines of at most {LONGEST_LINE:,} bytes, found a longer one at {place}: cut its text into "
                "several lines, or give the text as a .txt file"
            )
        if not line.strip():
            continue
        text = decoded(line, options, place)
        # An undecodable line is handed on as it is, for the rule on such documents to be applied once, in one place.
        yield place, line if text is None else text_of_row(_parsed(text, place), options, place)


def read_parquet(file: BinaryIO, origin: str, options: ReadOptions) -> Iterator[RawDocument]:
    """A document for each row of a table; a few hundred rows are in memory at a time."""
    parquet = require("pyarrow.parquet")
    try:
        table = parquet.ParquetFile(file)
        if options.text_field not in table.schema_arrow.names:
            text_of_row(dict.fromkeys(table.schema_arrow.names), options, origin)
        batches = table.iter_batches(batch_size=PARQUET_ROWS, columns=[options.text_field])
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"{origin} row {number}", text_of_row(row, options, f"{origin} row {number}")
    except require("pyarrow").ArrowInvalid as error:
        raise ValueError(f"expected a Parquet file, found a damaged one: {origin}: {error}") from error


READERS: dict[str, Reader] = {
    **dict.fromkeys(TEXT_SUFFIXES, read_text),
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".parquet": read_parquet,
}


def reader_of(path: Path) -> Reader | None:
    """The reader of a file by its suffix, below ``.gz`` where there is one; None when no reader fits.

    A ``.gz`` file without a further suffix is taken for text.
    """
    inner = Path(plain_name(path))
    if inner.name != path.name and not inner.suffix:
        return read_text
    return READERS.get(inner.suffix.lower())


def read_file(
    path: Path, reader: Reader, options: ReadOptions, on_read: Callable[[int], None] | None = None
) -> Iterator[RawDocument]:
    """The raw documents of one file, uncompressed where it is compressed; `on_read` as in ``open_bytes``.

    Raises:
        FileNotFoundError, PermissionError: The file cannot be opened.
        ValueError: It is damaged or does not hold what its suffix says.
    """
    with open_bytes(path, on_read) as file:
        yield from reader(file, str(path), options)


def _parsed(line: str, place: str) -> dict:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and brackets nested as deep
        raise ValueError(f"expected one JSON object a line, found something else at {place}: {error}") from error
