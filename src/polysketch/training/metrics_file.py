"""The file metrics.jsonl: one JSON object a line, each with a sum of itself, so that a changed digit is found."""

import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polysketch.storage import disk, strict_json
from polysketch.storage.outside import decoded, require_file

_SUM = "crc32"
_SUMMED = re.compile(rb'(.*), "crc32": "([0-9a-f]{8})"}', re.DOTALL)
_TEXTS = ("kind", "stage")
"""The entries of a line that are texts; all others are numbers, or tables of them."""


class MetricsFile:
    """The metrics of a run.

    Lines are appended unbuffered: a killed process loses none that `append` has returned from, and at worst leaves a
    torn last line, which reading and `drop_after` ignore. A damaged line costs no other. A line ends with `crc32`, the
    sum of its own bytes before that, which reading takes out again; lines of earlier versions have none.

    Args:
        path: the file; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, values: Mapping[str, Any]) -> None:
        """Append one line. Numbers that are not finite become null, since JSON has none."""
        disk.append(self.path, _summed(strict_json.encoded(values)))

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        require_file(self.path, most=None)
        if self.path.exists():
            disk.sync(self.path)

    def read(self) -> list[dict[str, Any]]:
        """The lines in order; torn and damaged ones are left out."""
        return [values for _, values in self._lines() if values is not None]

    def drop_after(self, step: int) -> int:
        """Drop, in one atomic replacement, the lines of later steps than `step`, and torn and damaged ones.

        Returns:
            How many lines were damaged that had whole ones of earlier steps after them: no kill leaves such. Where
            there is one, the file as it was is kept as `metrics-damaged.jsonl` beside it.
        """
        if not self.path.exists():
            return 0
        lines = list(self._lines())
        earlier = [values is not None and values["step"] <= step for _, values in lines]
        last = max((place for place, kept in enumerate(earlier) if kept), default=0)
        damaged = sum(values is None for _, values in lines[:last])
        content = self._content()
        if damaged:
            disk.replace_file(self.path.with_name(f"{self.path.stem}-damaged{self.path.suffix}"), content)
        kept = b"".join(line + b"\n" for (line, _), stays in zip(lines, earlier, strict=True) if stays)
        if kept != content:
            disk.replace_file(self.path, kept)
        return damaged

    def damaged(self) -> list[int]:
        """The numbers, from 1, of the lines that are torn or damaged."""
        content = self._content()
        return [number for number, line in enumerate(content.splitlines(), 1) if _values(line) is None]

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Every line that has its line break, which is written last; None for what is no line of metrics."""
        for line in self._content().split(b"\n")[:-1]:
            yield line, _values(line)

    def _content(self) -> bytes:
        """All of the file; nothing where there is none."""
        require_file(self.path, most=None)
        return self.path.read_bytes() if self.path.exists() else b""


def _summed(line: bytes) -> bytes:
    """The bytes of an object and a line break, with their sum as its last entry."""
    values = line.removesuffix(b"}\n")
    return b'%b, "%b": "%b"}\n' % (values, _SUM.encode(), _sum_of(values))


def _sum_of(values: bytes) -> bytes:
    return b"%08x" % zlib.crc32(values)


def _values(line: bytes) -> dict[str, Any] | None:
    """What a line says, without its sum; None where it is none of metrics, or is not as it was written."""
    try:
        values = decoded(line, "metrics")
    except ValueError:
        return None
    if not isinstance(values, dict) or not _is_line(values):
        return None
    summed = _SUMMED.fullmatch(line)
    if summed is None:  # of an earlier version; or one with a changed name of the sum, which is a text
        return None if any(isinstance(value, str) for name, value in values.items() if name not in _TEXTS) else values
    del values[_SUM]
    return values if _sum_of(summed[1]) == summed[2] else None


def _is_line(values: Mapping[str, Any]) -> bool:
    """Whether an object is one of a line of metrics: what others compute with and print are numbers."""
    numbers = [values[name] for name in ("loss", "tokens", "seconds") if values.get(name) is not None]
    has_place = isinstance(values.get("kind"), str) and isinstance(values.get("step"), int)
    return has_place and all(_is_finite(number) for number in numbers)


def _is_finite(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) <= sys.float_info.max
