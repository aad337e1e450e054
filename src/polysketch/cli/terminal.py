"""What is shown on a terminal: text that cannot steer it."""

import sys

__all__ = ["visible", "write_visible"]


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


def write_visible(text: str) -> None:
    """Write text of a model now, not when the line is full; on a terminal as `visible` has it, into a file as it is."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
