"""What a command's exit status says of a signal that stopped it, as shells count."""

import signal
from typing import Any

_SIGNAL = 128


def of_signal(number: int | None) -> int:
    """The status of a command that a signal stopped; of Ctrl-C where it is not known which."""
    return _SIGNAL + (number or signal.SIGINT)


def of_result(result: Any) -> int:
    """The status after training or a conversion, which say by what they were stopped."""
    return of_signal(result.signal_number) if result.stopped_by == "signal" else 0
