"""What the user sees while training: a moving bar on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any, TextIO

from polysketch.extras import require

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Shows steps, loss, tokens per second and time left.

    Args:
        first: steps already made when this process began.
        steps: steps of the whole run.
        stream: where to write.
        enabled: False shows nothing.
        bar: False writes plain lines on a terminal too.
    """

    def __init__(
        self, first: int, steps: int, *, stream: TextIO | None = None, enabled: bool = True, bar: bool = True
    ) -> None:
        self._stream = stream or sys.stderr
        self._enabled = enabled
        self._first = first
        self._steps = steps
        self._started = time.monotonic()
        self._last_line = float("-inf")
        self._bar = self._make_bar() if enabled and bar and self._stream.isatty() else None

    def _make_bar(self) -> Any:
        tqdm = require("tqdm").tqdm
        return tqdm(total=self._steps, initial=self._first, file=self._stream, unit="step", dynamic_ncols=True)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Tell that `step` steps are made."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._enabled and (self._line_is_due() or step == self._steps):
            left = format_seconds(self._seconds_left(step))
            self._print(f"step {step}/{self._steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {left} left")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        elif self._enabled:
            self._print(text)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _line_is_due(self) -> bool:
        now = time.monotonic()
        if now - self._last_line < _SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        return True

    def _seconds_left(self, step: int) -> float:
        seconds_per_step = (time.monotonic() - self._started) / max(1, step - self._first)
        return (self._steps - step) * seconds_per_step


def format_seconds(seconds: float) -> str:
    """`seconds` as H:MM:SS or M:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
