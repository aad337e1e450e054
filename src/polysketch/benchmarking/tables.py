"""Tables of text."""

from collections.abc import Sequence

Row = dict[str, str]
"""A row by the names of the columns."""


def print_table(rows: Sequence[Row]) -> None:
    """Print rows under the names of their columns, right-aligned; columns empty in every row are left out."""
    columns = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    for row in [dict(zip(columns, columns, strict=True)), *rows] if rows else []:
        print("  ".join(row[name].rjust(widths[name]) for name in columns))
