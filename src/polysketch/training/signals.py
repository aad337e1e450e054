"""Stop requests: SIGINT and SIGTERM ask the trainer to save and stop."""

import signal
import threading
from types import FrameType, TracebackType


class StopRequests:
    """Records the first SIGINT or SIGTERM while it is entered; a second one has its usual effect at once.

    The trainer looks at `signal_number` between two steps, so a stop costs at most one step and one checkpoint. Outside
    the main thread, where Python allows no handlers, nothing is installed and nothing is ever requested.

    Attributes:
        signal_number: the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # A handler that was not installed from Python cannot be put back by name: None means the default.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
