"""What all records of a size say together, as `summary.json` keeps it beside them. Loads no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysketch.storage.outside import read_object

SUMMARY_FILE = "summary.json"

_WORDS = ("study", "size", "ours", "why_open")
_STATES = {True: "holds", False: "does not hold", None: "open"}


def read_summary(path: Path) -> dict[str, Any]:
    """Read a summary.

    Raises:
        ValueError: the file is none.
    """
    found = read_object(path, "study", "size", "rows", "runs", "ours", "holds")
    if not (found["holds"] is None or isinstance(found["holds"], bool)):
        raise ValueError(f"{path}: expected true, false or null for holds, found {found['holds']!r}: delete it")
    for name in _WORDS:
        if not isinstance(found.get(name, ""), str):
            raise ValueError(f"{path}: expected text for {name}, found {found[name]!r}: delete it")
    return found


def state_of(summary: Mapping[str, Any]) -> str:
    """Whether the claim holds, in words; where it is open, why."""
    why = summary.get("why_open")
    return f"{_STATES[summary['holds']]} ({why})" if why else _STATES[summary["holds"]]


def rows_in(folder: Path) -> list[str]:
    """The row of every record in a folder, by the names of the files."""
    return [path.name.rpartition("-seed")[0] for path in sorted(folder.glob("*-seed*.json"))]
