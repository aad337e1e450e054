"""A bound of time for patterns that others wrote: a regular expression may take years on a text made for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

# A hundred times what usual tokenizers take on one busy core.
SECONDS, SECONDS_PER_BYTE = 10.0, 1e-4


def has_patterns(description: Any) -> bool:
    """Whether a tokenizer.json has regular expressions of its author's."""
    if isinstance(description, dict):
        return "Regex" in description or any(has_patterns(one) for one in description.values())
    return isinstance(description, list) and any(has_patterns(one) for one in description)


def within_time(call: Callable[[], T], num_bytes: int, what: str) -> T:
    """What a call gives, unless it takes far longer than such calls do.

    The call runs in a thread of its own, which nothing can stop: after the error it may go on until the process ends.
    So an interrupt is heard, too, while the library matches.

    Args:
        call: of the library of tokenizers, which frees the interpreter while it works.
        num_bytes: of the text.
        what: is done, for the message.

    Raises:
        ValueError: the time is over, or the library gave up, which it does after ten million steps at one place.
        Whatever the call raises.
    """
    ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            ended.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            ended.put((None, error))

    threading.Thread(target=work, name="polysketch-tokenizer", daemon=True).start()
    seconds = SECONDS + SECONDS_PER_BYTE * num_bytes
    found = _waited_for(ended, seconds)
    if found is None:
        raise ValueError(
            f"expected {what} within {seconds:.0f} seconds, found no end: a regular expression in the tokenizer's file "
            "takes too long on this text; take another tokenizer"
        )
    result, error = found
    if type(error).__name__ == "PanicException":
        raise ValueError(
            f"expected {what}, found that a regular expression in the tokenizer's file takes too long on this text: "
            f"{' '.join(str(error).split())}; take another tokenizer"
        ) from None
    if error is not None:
        raise error
    return result


def _waited_for(ended: SimpleQueue[T], seconds: float) -> T | None:
    """What comes, unless the process has computed for so long; a process that is paused, or gets no core, has time."""
    computed, wait = time.process_time(), seconds
    while True:
        try:
            return ended.get(timeout=wait)
        except Empty:
            if time.process_time() - computed >= seconds:
                return None
            wait = 1.0
