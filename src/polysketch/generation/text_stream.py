"""Text out of tokens as they come: whole characters only, and nothing of a stop string."""

import codecs
from collections.abc import Callable, Iterable, Sequence

__all__ = ["TextStream"]


class TextStream:
    """The text of one continuation.

    A character may span tokens, and so may a stop string: what a later token could still make part of one is held back.

    Args:
        decode_bytes: the bytes of token ids, as `TokenizerLike.decode_bytes`.
        stop: strings that end the text; they are not part of it.

    Raises:
        ValueError: an empty stop string.
        TypeError: one string in place of several.

    Attributes:
        stopped: whether a stop string has ended the text.
    """

    def __init__(self, decode_bytes: Callable[[Iterable[int]], bytes], stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str):
            raise TypeError(f"expected a sequence of stop strings, found the string {stop!r}")
        if not all(stop):
            raise ValueError("expected stop strings of at least one character, found an empty one")
        self.stopped = False
        self._decode_bytes = decode_bytes
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def add(self, token: int) -> bool:
        """Take a token, and say whether the text has ended."""
        if not self.stopped:
            self._append(self._decoder.decode(self._decode_bytes([token])))
        return self.stopped

    def take(self) -> str:
        """What came since the last call and no later token changes."""
        certain = len(self._held) - (0 if self.stopped else self._uncertain())
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def finish(self) -> str:
        """The rest, where no more tokens come; an unfinished character becomes U+FFFD."""
        if not self.stopped:
            self._append(self._decoder.decode(b"", final=True))
        text, self._held = self._held, ""
        return text

    def _append(self, text: str) -> None:
        self._held += text
        found = [place for place in map(self._held.find, self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, self._held[: min(found)]

    def _uncertain(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max((len(each) - 1 for each in self._stop), default=0)
        ends = (self._held[-length:] for length in range(min(longest, len(self._held)), 0, -1))
        return next((len(end) for end in ends if any(each.startswith(end) for each in self._stop)), 0)
