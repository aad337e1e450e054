"""JSON lines written as they come, and names of files with the time in them."""

import datetime
import json
from pathlib import Path
from typing import Any


def stamped(prefix: str, suffix: str) -> str:
    """A file name with the time in it."""
    return f"{prefix}-{datetime.datetime.now():%Y%m%d-%H%M%S}{suffix}"


_ANSWERS = ("time", "train", "decode", "failed", "skipped")


class Journal:
    """A file of JSON lines, each on disk as soon as it is known: what a killed run leaves is worth reading.

    Args:
        path: created, with its folder.
        keep: continue an existing file, as a process does that another one started; else it is replaced.
    """

    def __init__(self, path: Path, *, keep: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.records: list[dict[str, Any]] = []
        if keep:
            self.read_again()
        else:
            path.write_text("")

    def news(self) -> list[dict[str, Any]]:
        """Take over, and return, what a process has appended; a line that it is still writing is left for later."""
        known = len(self.records)
        self.records = [json.loads(line) for line in self._whole_lines()]
        return self.records[known:]

    def read_again(self) -> None:
        """Take over what a process appended that has ended; a line that its end cut short is dropped."""
        self.path.write_text("".join(self._whole_lines()))
        self.news()

    def _whole_lines(self) -> list[str]:
        return [line for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]

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

    def has(self, **labels: Any) -> bool:
        """Whether a case has been answered: by a time, a failure or the reason why it was left out."""
        return any(labels.items() <= record.items() for record in self.records if record["kind"] in _ANSWERS)

    def unanswered(self) -> list[dict[str, Any]]:
        """Labels of cases that were begun, and whose process ended before their answer."""
        begun = [{name: value for name, value in one.items() if name != "kind"} for one in self.of("begun")]
        return [one for one in begun if not self.has(**{name: one[name] for name in one if name != "section"})]
