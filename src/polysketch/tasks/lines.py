"""Lines of local files of text, with the place of each for what is wrong with it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from polysketch.data.compressed import plain_name, read_bytes
from polysketch.data.corpus.readers import LONGEST_LINE
from polysketch.storage.outside import decoded


def layout_of(path: Path) -> str:
    """The layout that a file's name tells: its suffix in lower case, without that of compression."""
    return Path(plain_name(path)).suffix.lower()


def placed_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Where a line is, as FILE:NUMBER, and the line; blank ones too. A byte order mark before the first is left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no UTF-8.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8, found something else in {path}: {error}") from error
    return ((f"{path}:{number}", line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1))


def filled_lines(path: Path) -> Iterator[tuple[str, str]]:
    """`placed_lines` without blank ones."""
    return ((place, line) for place, line in placed_lines(path) if line.strip())


def two_fields(path: Path, first: str, second: str) -> Iterator[tuple[str, Any, Any]]:
    """Of JSON Lines: the place of each object, and what it has in two fields.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is no object with both fields; the message says where.
    """
    for place, line in filled_lines(path):
        try:
            row = decoded(line, place)
            found = row[first], row[second]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{place}: expected an object with {first!r} and {second!r}") from error
        yield place, *found


def two_named_columns(path: Path, first: str, second: str) -> Iterator[tuple[str, str, str]]:
    """Of a table of values apart by commas, with a heading (RFC 4180): as `two_fields`; a row's place is its last line.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a heading without both names, a row of other columns, quotes that are not closed, a cell of over
            64 million characters.
    """
    csv.field_size_limit(LONGEST_LINE)  # the module's own limit is shorter than long documents
    text = "\n".join(line for _, line in placed_lines(path))
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        names = next(rows, [])
        if not {first, second} <= {*names}:
            found = ", ".join(map(repr, names)) or "nothing"
            raise ValueError(f"{path}:1: expected columns named {first!r} and {second!r}, found {found}")
        for row in filter(None, rows):  # without blank lines
            place = f"{path}:{rows.line_num}"
            if len(row) != len(names):
                raise ValueError(f"{place}: expected {len(names)} columns, found {len(row)}: is a comma out of quotes?")
            yield place, row[names.index(first)], row[names.index(second)]
    except csv.Error as error:
        raise ValueError(f"{path}:{rows.line_num}: expected a table whose quotes are closed: {error}") from error


def columns(path: Path, count: int, expected: str) -> Iterator[tuple[str, list[str]]]:
    """Of a table: the place of each row, and its cells, which stand apart by tabs.

    Args:
        path: of the table.
        count: of columns.
        expected: the columns in words, for the message.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another number of columns; the message says where.
    """
    for place, line in filled_lines(path):
        cells = line.split("\t")
        if len(cells) != count:
            raise ValueError(f"{place}: expected {expected}, found {len(cells)}")
        yield place, cells


def ordered_names(names: Iterable[str]) -> list[str]:
    """Each name once: in the order of their numbers where all are whole numbers, else in that of the alphabet."""
    every = set(names)
    if all(_WHOLE_NUMBER.fullmatch(name) for name in every):
        return sorted(every, key=lambda name: (int(name), name))
    return sorted(every)


_WHOLE_NUMBER = re.compile("-?[0-9]{1,18}")
