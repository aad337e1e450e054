"""What `polysketch study --list` shows: every table of the papers with its state. Loads no PyTorch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysketch.storage.outside import read_object
from polysketch.studies.catalogue import ENTRIES, Entry

STATES = {True: "holds", False: "does not hold", None: "open"}


_COLUMNS = 80  # of a terminal


def listed(results: Path) -> str:
    """A line or two for each table or figure: where it is from, its claim, and the state of its study.

    Args:
        results: where studies keep their records.
    """
    return "\n".join(
        _filled(f"{one.source}: {one.claim}", "") + "\n" + _filled(_state(one, results), "    ") for one in ENTRIES
    )


def _filled(text: str, indent: str) -> str:
    """Lines that fit a terminal, the later ones further in."""
    return textwrap.fill(text, _COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _state(entry: Entry, results: Path) -> str:
    """By size, how many rows have records and what they say; or why there is no study."""
    if not entry.study:
        return entry.why_not
    files = sorted(results.glob(f"{entry.study}-*/summary.json"))
    found = [read_summary(file) for file in files]
    told = " | ".join(_told(one) for one in found if one["study"] == entry.study)
    return f"{entry.study}: {told or f'no record in {results}'}"


def read_summary(path: Path) -> dict[str, Any]:
    """What all records of a size say together.

    Raises:
        ValueError: the file is no summary.
    """
    found = read_object(path, "study", "size", "rows", "of_rows", "runs", "ours", "holds")
    if not (found["holds"] is None or isinstance(found["holds"], bool)):
        raise ValueError(f"{path}: expected true, false or null for holds, found {found['holds']!r}: delete it")
    return found


def _told(one: Mapping[str, Any]) -> str:
    made = f"{one['size']}: {one['rows']} of {one['of_rows']} rows, {one['runs']} runs"
    return f"{made}; {one['ours']}; {STATES[one['holds']]}"
