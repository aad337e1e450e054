"""JSON lines written as they come, and names of files with the time in them."""

import datetime
import json
from pathlib import Path
from typing import Any


def stamped(prefix: str, suffix: str) -> str:
    """A file name with the time in it."""
    return f"{prefix}-{datetime.datetime.now():%Y%m%d-%H%M%S}{suffix}"


class Journal:
    """A file of JSON lines, each on disk as soon as it is known: what a killed run leaves is worth reading.

    Args:
        path: created, with its folder; an existing file is replaced.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.records: list[dict[str, Any]] = []
        path.write_text("")

    def write(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append one record."""
        record = {"kind": kind, **values}
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind so far."""
        return [record for record in self.records if record["kind"] == kind]
