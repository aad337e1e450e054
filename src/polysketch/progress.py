"""One line of progress for everything that takes longer than two seconds: share, rate and time left.

On a terminal the line is written again and again in its place; into a file or a pipe goes a line each ten seconds. It
is plain ASCII without colours, so that NO_COLOR and a terminal of any encoding have what they want.
"""

import shutil
import sys
import time
from types import TracebackType
from typing import Self, TextIO

__all__ = ["Progress", "format_seconds"]

_SECONDS_WITHOUT = 2.0
_SECONDS_BETWEEN = {True: 0.2, False: 10.0}  # on a terminal; else


class Progress:
    """Shows how much of something is done.

    Attributes:
        total: how much there is.
        done: how much of it is done.
        began_at: how much was done before.

    Args:
        name: what is being done, before the figures; nothing by default.
        total: how much there is; None where nobody knows: no share and no time left then.
        unit: of `total`, in the plural: tokens, steps, bytes. Bytes are shown as megabytes.
        done: how much was done before.
        enabled: False shows nothing.
        stream: where to write; standard error by default.
        quiet_seconds: how long nothing is shown at first.
    """

    def __init__(
        self,
        name: str = "",
        total: int | None = None,
        unit: str = "",
        *,
        done: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
        quiet_seconds: float = _SECONDS_WITHOUT,
    ) -> None:
        self._name, self.total, self._unit, self._enabled = name, total, unit, enabled
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self.began_at = self.done = done
        self._started = time.monotonic()
        self._next = self._started + quiet_seconds
        self._width = 0  # of the line that stands on the terminal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, done: int, note: str = "", *, always: bool = False) -> None:
        """Tell how much is done.

        Args:
            done: in all, what was done before included.
            note: stands behind the share.
            always: show it, however short ago something was shown.
        """
        self.done = done
        now = time.monotonic()
        if self._enabled and (always or now >= self._next):
            self._next = now + _SECONDS_BETWEEN[self._on_terminal]
            self._show(self._line(note, now))

    def advance(self, amount: int) -> None:
        """Tell how much more is done."""
        self.update(self.done + amount)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._enabled:
            self._clear()
            print(text, file=self._stream, flush=True)

    def close(self, *, keep: bool = False) -> None:
        """Take the line from the terminal, or keep it there."""
        if keep and self._width:
            print(file=self._stream, flush=True)
            self._width = 0
        self._clear()

    def seconds_left(self, now: float | None = None) -> float:
        """How long the rest takes at the speed so far; 0 where the total is not known."""
        seconds = (time.monotonic() if now is None else now) - self._started
        return seconds / max(1, self.done - self.began_at) * ((self.total or self.done) - self.done)

    def _line(self, note: str, now: float) -> str:
        parts = [self._name] if self._name else []
        if self.total:
            parts.append(f"{100 * self.done / self.total:.1f} %")
        parts += [note] if note else []
        if self._unit:
            parts.append(_rate((self.done - self.began_at) / max(now - self._started, 1e-9), self._unit))
        if self.total:
            parts.append(f"{format_seconds(self.seconds_left(now))} left")
        return "  ".join(parts)

    def _show(self, line: str) -> None:
        if self._on_terminal:
            line = line[: shutil.get_terminal_size().columns - 1]  # a longer one would not be written over
            print("\r" + line.ljust(self._width), end="", file=self._stream, flush=True)
            self._width = len(line)
        else:
            print(line, file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._width:
            print("\r" + " " * self._width, end="\r", file=self._stream, flush=True)
            self._width = 0


def _rate(rate: float, unit: str) -> str:
    """A rate with as many digits as tell something."""
    if unit == "bytes":
        return f"{rate / 1e6:.1f} MB/s"
    return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"


def format_seconds(seconds: float) -> str:
    """`seconds` as H:MM:SS or M:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
