"""What all records of a size say together, as `summary.json` keeps it beside them. Loads no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysketch.storage.outside import read_object

SUMMARY_FILE = "summary.json"

_WORDS = ("study", "size", "told", "ours")
_COUNTS = ("runs", "rows", "own_rows", "of_rows")
_WHY = "why_open"  # where a claim is open
_STATES = {True: "holds", False: "does not hold", None: "open"}


def read_summary(path: Path) -> dict[str, Any]:
    """Read a summary.

    Raises:
        ValueError: the file is none.
    """
    found = read_object(path, *_WORDS, *_COUNTS, "papers", "holds")
    if not (found["holds"] is None or isinstance(found["holds"], bool)):
        raise ValueError(f"{path}: expected true, false or null for holds, found {found['holds']!r}: delete it")
    kinds = {**dict.fromkeys((*_WORDS, _WHY), str), **dict.fromkeys(_COUNTS, int), "papers": dict}
    for name, kind in kinds.items():
        if not isinstance(found.get(name, kind()), kind):
            raise ValueError(f"{path}: expected {kind.__name__} for {name}, found {found[name]!r}: delete it")
    return found


def state_of(summary: Mapping[str, Any]) -> str:
    """Whether the claim holds, in words; where it is open, why."""
    why = summary.get(_WHY)
    return f"{_STATES[summary['holds']]} ({why})" if why else _STATES[summary["holds"]]
