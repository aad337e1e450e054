"""metrics.jsonl: one JSON object per line, appended as training goes, cut back when a run is resumed."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polysketch.storage import disk


class MetricsFile:
    """The metrics of a run.

    Lines are appended unbuffered: a killed process loses none that `append` has returned from, and at worst leaves a
    torn last line, which reading and `drop_after` ignore.

    Args:
        path: the file; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, values: Mapping[str, Any]) -> None:
        """Append one line. Numbers that are not finite become null, since JSON has none."""
        line = json.dumps({key: _finite(value) for key, value in values.items()}, allow_nan=False)
        disk.append(self.path, line.encode() + b"\n")

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        if self.path.exists():
            disk.sync(self.path)

    def read(self) -> list[dict[str, Any]]:
        """The lines in order, up to the first torn or damaged one (a kill or a power cut may leave such an end)."""
        return [values for _, values in self._lines()]

    def drop_after(self, step: int) -> None:
        """Drop, in one atomic replacement, the lines of later steps than `step` and a torn or damaged end."""
        if not self.path.exists():
            return
        kept = b"".join(line + b"\n" for line, values in self._lines() if values["step"] <= step)
        if kept != self.path.read_bytes():
            disk.replace_file(self.path, kept)

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        content = self.path.read_bytes() if self.path.exists() else b""
        for line in content.split(b"\n")[:-1]:  # a line is whole only with its line break, which is written last
            try:
                values = json.loads(line)
            except ValueError:
                return
            if not isinstance(values, dict) or not isinstance(values.get("step"), int):
                return
            yield line, values


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
