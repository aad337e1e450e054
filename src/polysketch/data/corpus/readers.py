"""Readers of files, by suffix: each turns one open file into raw documents, one at a time."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from polysketch.data.compressed import open_bytes, plain_name, read_bounded
from polysketch.data.corpus.cutting import pieces_of_file
from polysketch.data.corpus.document import ReadOptions, decoded, text_of_row
from polysketch.extras import require


class Damaged(NamedTuple):
    """Stands for a document that could not be read, and was not to stop the reading.

    Attributes:
        reason: What was expected, what was found, and where.
    """

    reason: str


# Where a document comes from (file and row), and its text, decoded or not.
RawDocument = tuple[str, bytes | str | Damaged]
Contents = TypeVar("Contents", bound=bytes | str | None)
Reader = Callable[[BinaryIO, str, ReadOptions], Iterator[RawDocument]]

PARQUET_ROWS = 256
# A line of JSON is in memory about five times at once.
LONGEST_LINE = 64_000_000  # bytes
# A text that is kept whole is too.
LONGEST_TEXT = 256_000_000  # bytes

TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".xml", ".css", ".srt", ".org", ".adoc"),
    *(".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js"),
    *(".ts", ".jsx", ".tsx", ".go", ".rs", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".swift", ".cs"),
    *(".sh", ".bash", ".sql", ".toml", ".cfg", ".ini", ".yaml", ".yml"),
)


def read_text(file: BinaryIO, origin: str, options: ReadOptions) -> Iterator[RawDocument]:
    """A plain text file: one document, or pieces of about ``options.cut_text`` bytes, see ``corpus.cutting``."""
    if not options.cut_text:
        whole = read_bounded(file, LONGEST_TEXT, f"{origin}: cut it, with --cut-text 1000000 for instance")
        yield origin, _without_mark(whole, options)
        return
    pieces = pieces_of_file(file, options.cut_text, options.encoding)
    yield origin, _without_mark(next(pieces, b""), options)  # an empty file is a document, to be counted
    for number, piece in enumerate(pieces, start=2):
        yield f"{origin} piece {number}", piece


def read_json_lines(file: BinaryIO, origin: str, options: ReadOptions) -> Iterator[RawDocument]:
    """A document for each line: a JSON object with a text field. Blank lines are passed over."""
    if not options.can_cut:
        raise ValueError(
            f"expected JSON lines in an encoding whose line ends are single bytes, found {options.encoding} for "
            f"{origin}: write them in UTF-8"
        )
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
        place = f"{origin}:{number}"
        line = _without_mark(line, options) if number == 1 else line
        if line.strip():
            yield place, _unless_damaged(options, _text_of_line, file, line, options, place)


def _without_mark(beginning: bytes, options: ReadOptions) -> bytes:
    """The beginning of a file without the byte order mark that some editors put before UTF-8."""
    return beginning.removeprefix(codecs.BOM_UTF8) if _is_utf8(options.encoding) else beginning


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "utf-8"


def _text_of_line(file: BinaryIO, line: bytes, options: ReadOptions, place: str) -> bytes | str:
    if len(line) > LONGEST_LINE:
        while line and not line.endswith(b"\n"):  # the next line is read after this one
            line = file.readline(LONGEST_LINE)
        raise ValueError(
            f"expected lines of at most {LONGEST_LINE:,} bytes, found a longer one at {place}: cut its text into "
            "several lines, or give the text as a .txt file"
        )
    text = decoded(line, options, place)
    # An undecodable line is handed on as it is, for the rule on such documents to be applied once, in one place.
    return line if text is None else text_of_row(_parsed(text, place), options, place)


def _unless_damaged(options: ReadOptions, read: Callable[..., Contents], *arguments: Any) -> Contents | Damaged:
    """What is read, or why it could not be, where that is not to stop the reading."""
    try:
        return read(*arguments)
    except ValueError as error:
        if options.damaged == "error":
            raise
        return Damaged(str(error))


def read_comma_separated(file: BinaryIO, origin: str, options: ReadOptions) -> Iterator[RawDocument]:
    """A document for each row of a table in text, whose first row names the columns."""
    return _read_table(file, origin, options, ",")


def read_tab_separated(file: BinaryIO, origin: str, options: ReadOptions) -> Iterator[RawDocument]:
    """The same with tabs between columns."""
    return _read_table(file, origin, options, "\t")


def _read_table(file: BinaryIO, origin: str, options: ReadOptions, between: str) -> Iterator[RawDocument]:
    csv.field_size_limit(LONGEST_LINE)
    encoding = "utf-8-sig" if _is_utf8(options.encoding) else options.encoding
    # What is not in the encoding becomes lone surrogates, for the rule on such documents to find it.
    with io.TextIOWrapper(file, encoding, errors="surrogateescape", newline="") as text:
        lines = _BoundedLines(text, origin)
        rows = csv.reader(lines, delimiter=between, strict=True)
        names = _next_row(rows, f"{origin}:1") or []
        if options.text_field not in names:
            text_of_row(dict.fromkeys(names), options, origin)
        table = _Table(rows, names, options.text_field)
        place = f"{origin}:{lines.number + 1}"
        while (contents := _unless_damaged(options, table.next_text, place)) is not None:
            yield place, contents
            place = f"{origin}:{lines.number + 1}"


class _BoundedLines:
    """The lines of a table; a field may go on over several.

    After one that is too long, those behind it are still given: a generator would be at its end.

    Attributes:
        number: of the last line, from 1.
    """

    def __init__(self, lines: io.TextIOWrapper, origin: str) -> None:
        self._lines, self._origin = lines, origin
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._lines.readline(LONGEST_LINE + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > LONGEST_LINE:
            while line and not line.endswith(("\n", "\r")):
                line = self._lines.readline(LONGEST_LINE)
            raise ValueError(
                f"expected lines of at most {LONGEST_LINE:,} letters, found a longer one at "
                f"{self._origin}:{self.number}"
            )
        return line


class _Table:
    """The texts of a table's rows, one after the other."""

    def __init__(self, rows: Any, names: list[str], field: str) -> None:
        self._rows, self._names, self._column = rows, names, names.index(field)

    def next_text(self, place: str) -> str | None:
        """The text of the next row that is not blank; None after the last one."""
        row: list[str] | None = []
        while row is not None and not row:
            row = _next_row(self._rows, place)
        if row is None:
            return None
        if len(row) != len(self._names):
            raise ValueError(
                f"expected {len(self._names)} columns at {place}, found {len(row)}: a text that holds what stands "
                "between columns must be in quotes"
            )
        return row[self._column]


def _next_row(rows: Any, place: str) -> list[str] | None:
    try:
        return next(rows, None)
    except csv.Error as error:
        raise ValueError(f"expected a table whose quotes are closed, found another at {place}: {error}") from error


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
            place = f"{origin} row {number}"
            yield place, _unless_damaged(options, text_of_row, row, options, place)
    except UnicodeDecodeError as error:
        raise ValueError(f"expected texts in UTF-8 in {origin}, found other bytes: {error}") from error
    except (require("pyarrow").ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of what stands in the file
        raise ValueError(f"expected a Parquet file, found a damaged one: {origin}: {error}") from error


READERS: dict[str, Reader] = {
    **dict.fromkeys(TEXT_SUFFIXES, read_text),
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".csv": read_comma_separated,
    ".tsv": read_tab_separated,
    ".parquet": read_parquet,
}
FORMATS: dict[str, Reader] = {
    "text": read_text,
    "jsonl": read_json_lines,
    "csv": read_comma_separated,
    "tsv": read_tab_separated,
    "parquet": read_parquet,
}
"""The reader of every format that a user may say, whatever a file's name ends with."""


def reader_of(path: Path, said: str = "auto") -> Reader | None:
    """The reader of a file by its suffix, below ``.gz`` where there is one; None when no reader fits.

    A ``.gz`` file without a further suffix is taken for text.

    Args:
        path: the file.
        said: one of ``FORMATS``, which goes before the suffix; or ``"auto"``.
    """
    if said != "auto":
        return FORMATS[said]
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
