"""The file metrics.jsonl: one JSON object a line, each with the name of its run and a sum of itself."""

import re
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polysketch.storage import disk, strict_json
from polysketch.storage.outside import decoded, require_file

_SUM = "crc32"
_SUMMED = re.compile(rb'(.*), "crc32": "([0-9a-f]{8})"}', re.DOTALL)
_RUN = "run"
_RUN_DIGITS = 8
"""Of a run's identity, as many as a line has: enough to tell the runs of one person apart."""
_TEXTS = ("kind", "stage")
"""The entries of a line that are texts; all others are numbers, or tables of them."""


class MetricsFile:
    """The metrics of a run.

    Lines are appended unbuffered: a killed process loses none that `append` has returned from, and at worst leaves a
    torn last line, which reading and `drop_after` ignore. A damaged line costs no other. A line ends with `run`, the
    first digits of its run's identity, and `crc32`, the sum of its own bytes before that. Reading takes them out again,
    and leaves out what is damaged or of another run; lines of earlier versions have neither.

    Args:
        path: the file; need not exist.
        identity: what tells the run from others; None of a run that has no such name, where lines of any run are read.
    """

    def __init__(self, path: Path, identity: str | None = None) -> None:
        self.path = path
        self._run = None if identity is None else str(identity)[:_RUN_DIGITS]

    def append(self, values: Mapping[str, Any]) -> None:
        """Append one line. Numbers that are not finite become null, since JSON has none."""
        named = values if self._run is None else {**values, _RUN: self._run}
        disk.append(self.path, _summed(strict_json.encoded(named)))

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        require_file(self.path, most=None)
        if self.path.exists():
            disk.sync(self.path)

    def read(self) -> list[dict[str, Any]]:
        """The lines in order; torn and damaged ones, and those of other runs, are left out."""
        said = map(_values, self._content().split(b"\n")[:-1])  # a line break is written last
        own = (values for values in said if values is not None and self._is_own(values))
        return [{name: value for name, value in values.items() if name != _RUN} for values in own]

    def drop_after(self, step: int) -> int:
        """Drop, in one atomic replacement, lines of later steps than `step`, torn or damaged, or of other runs.

        Returns:
            How many lines there were that no kill leaves: of another run, or damaged with whole ones of earlier steps
            after them. Where there is one, the file as it was is kept as `metrics-damaged.jsonl` beside it.
        """
        if not self.path.exists():
            return 0
        content = self._content()
        lines = content.split(b"\n")[:-1]  # a line break is written last
        said = [_values(line) for line in lines]
        kept = [values is not None and self._is_own(values) and values["step"] <= step for values in said]
        last = max((place for place, stays in enumerate(kept) if stays), default=0)
        damaged = sum(place < last if values is None else not self._is_own(values) for place, values in enumerate(said))
        if damaged:
            disk.replace_file(self.path.with_name(f"{self.path.stem}-damaged{self.path.suffix}"), content)
        rest = b"".join(line + b"\n" for line, stays in zip(lines, kept, strict=True) if stays)
        if rest != content:
            disk.replace_file(self.path, rest)
        return damaged

    def damaged(self) -> list[int]:
        """The numbers, from 1, of the lines that are damaged, or of another run; a kill may leave a torn last one."""
        content = self._content()
        said = enumerate(map(_values, content.split(b"\n")[:-1]), 1)
        return [number for number, values in said if values is None or not self._is_own(values)]

    def _is_own(self, values: Mapping[str, Any]) -> bool:
        """Whether a line is of this run, as far as either says."""
        return self._run is None or values.get(_RUN, self._run) == self._run

    def _content(self) -> bytes:
        """All of the file; nothing where there is none."""
        require_file(self.path, most=None)
        return self.path.read_bytes() if self.path.exists() else b""


def cut_back(metrics: MetricsFile, step: int, say: Callable[[str], None]) -> None:
    """Bring metrics to where a checkpoint of this step left them, and tell what does not belong there."""
    dropped = metrics.drop_after(step)
    if dropped:
        say(
            f"note: {dropped} lines of {metrics.path}, damaged or of another run, were left out; the file as it was is "
            "beside it"
        )


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
