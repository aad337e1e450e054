"""Flags that hold several numbers with commas between."""

from collections.abc import Callable
from typing import TypeVar

__all__ = ["numbers"]

Number = TypeVar("Number", int, float)


def numbers(text: str, flag: str, *, least: Number, kind: Callable[[str], Number]) -> list[Number]:
    """The numbers of a flag, each once, in the order given.

    Args:
        text: for instance "0,5".
        flag: its name, for the message.
        least: the smallest that is allowed.
        kind: int or float.

    Raises:
        ValueError: something that is no such number, or none at all.
    """
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            value = kind(part)
        except ValueError:
            raise ValueError(f"{flag}: expected numbers with commas between, found {part!r}") from None
        if not value >= least:
            raise ValueError(f"{flag}: expected numbers of at least {least}, found {part}")
        found.append(value)
    if not found:
        raise ValueError(f"{flag}: expected at least one number, found {text!r}")
    return list(dict.fromkeys(found))
