"""What `polysketch study --list` shows: every table of the papers with its state. Loads no PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysketch.studies.catalogue import ENTRIES, Entry

STATES = {True: "holds", False: "does not hold", None: "open"}


def listed(results: Path) -> str:
    """A line or two for each table or figure: where it is from, its claim, and the state of its study.

    Args:
        results: where studies keep their records.
    """
    return "\n".join(f"{one.source}: {one.claim}\n    {_state(one, results)}" for one in ENTRIES)


def _state(entry: Entry, results: Path) -> str:
    """By size, how many rows have records and what they say; or why there is no study."""
    if not entry.study:
        return entry.why_not
    files = sorted(results.glob(f"{entry.study}-*/summary.json"))
    found = [json.loads(file.read_bytes()) for file in files]
    told = " | ".join(_told(one) for one in found if one["study"] == entry.study)
    return f"{entry.study}: {told or f'no record in {results}'}"


def _told(one: Mapping[str, Any]) -> str:
    made = f"{one['size']}: {one['rows']} of {one['of_rows']} rows, {one['runs']} runs"
    return f"{made}; {one['ours']}; {STATES[one['holds']]}"
