"""What is shown on a terminal: text that cannot steer it."""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

__all__ = ["visible", "visible_streams", "write_visible"]


def visible(text: str) -> str:
    """The text with control characters escaped, but for line breaks and tabs.

    Escape sequences can rename the window, fill the clipboard and hide what was printed before them.
    """
    if text.isprintable():
        return text
    return "".join(each if each in "\n\t" or each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode() if ord(character) < 0xA0 or _turns(character) else character


def _turns(character: str) -> bool:
    """Whether it changes the direction of writing, and so the order of what is read."""
    return "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class _VisibleStream:
    """A stream to a terminal that shows all text as `visible` has it.

    The carriage returns of bars begin or end it. Colours, which trackers print, are left out.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, and say how long the text was."""
        length, text = len(text), _COLOURS.sub("", text)
        begins, ends = text.startswith("\r"), text.endswith("\r") and text != "\r"
        shown = visible(text[begins : len(text) - ends])
        self._stream.write("\r" * begins + shown + "\r" * ends)
        return length

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """All else is the stream's."""
        return getattr(self._stream, name)


@contextlib.contextmanager
def visible_streams() -> Iterator[None]:
    """Inside, nothing that is printed can steer a terminal, whatever name or text of a stranger's is in it."""
    before = sys.stdout, sys.stderr
    shown: list[Any] = [_VisibleStream(stream) if stream.isatty() else stream for stream in before]
    sys.stdout, sys.stderr = shown
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def write_visible(text: str) -> None:
    """Write text of a model now, not when the line is full; on a terminal as `visible` has it, into a file as it is."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
