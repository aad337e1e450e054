"""Tables of text, as wide as a terminal at most where words can be broken over lines."""

import textwrap
from collections.abc import Sequence

Row = dict[str, str]
"""A row by the names of the columns."""

COLUMNS = 80
"""Of a terminal, at least."""

_BETWEEN = "  "


def print_table(rows: Sequence[Row]) -> None:
    """Print rows under the names of their columns, right-aligned; columns empty in every row are left out.

    Names of several words stand in several lines where the table would be wider than `COLUMNS`.
    """
    names = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    if not names:
        return
    widths = _widths(names, rows)
    for line in _heads(names, widths):
        print(_joined(line, widths))
    for row in rows:
        print(_joined([row[name] for name in names], widths))


def print_text(text: str) -> None:
    """Print a sentence in lines of at most `COLUMNS`."""
    print(textwrap.fill(text, COLUMNS))


def _widths(names: Sequence[str], rows: Sequence[Row]) -> list[int]:
    """The widths of columns: the widest names are broken first, until all fit or no word can be parted from another."""
    least = [max(map(len, [*name.split(), *(row[name] for row in rows)])) for name in names]
    widths = [max(len(name), narrow) for name, narrow in zip(names, least, strict=True)]
    while sum(widths) + len(_BETWEEN) * (len(names) - 1) > COLUMNS:
        spare, column = max(
            (width - narrow, index) for index, (width, narrow) in enumerate(zip(widths, least, strict=True))
        )
        if spare == 0:
            break
        widths[column] -= 1
    return widths


def _heads(names: Sequence[str], widths: Sequence[int]) -> list[list[str]]:
    """Lines of names, which stand at the bottom."""
    wrapped = [textwrap.wrap(name, width, break_long_words=False) for name, width in zip(names, widths, strict=True)]
    height = max(map(len, wrapped))
    padded = [[""] * (height - len(lines)) + lines for lines in wrapped]
    return [list(line) for line in zip(*padded, strict=True)]


def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _BETWEEN.join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def megabytes(size: int | None) -> str:
    """For a table; empty where there is none."""
    return "" if size is None else f"{size / 1e6:,.1f}"
