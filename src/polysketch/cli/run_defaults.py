"""Flags that a run already knows need not be typed again: `--resume` takes them from its folder."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

__all__ = ["flag_values", "value_of"]

_OF_ONE_COMMAND = ("resume", "checkpoint", "extend", "max_minutes", "json")
"""Options that are about one process and not about the run."""


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """What is given after a flag on a command line, as `--flag VALUE` or `--flag=VALUE`; None without it.

    Underscores stand for hyphens, as they do for the parser.
    """
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.startswith("--") and name.replace("_", "-") == flag:
            return value if equals else next(iter(arguments[place + 1 : place + 2]), None)
    return None


def flag_values(flags_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass of flags that the options in a run's configuration give, in the fields' own types.

    Args:
        flags_class: the dataclass.
        options: JSON values by name. Unknown ones are left out, and those that are about one process alone.
    """
    hints = typing.get_type_hints(flags_class)
    known = [field.name for field in dataclasses.fields(flags_class)]
    return {
        name: _typed(hints[name], options[name]) for name in known if name in options and name not in _OF_ONE_COMMAND
    }


def _typed(hint: Any, value: Any) -> Any:
    if isinstance(value, str) and (hint is Path or Path in get_args(hint)):
        return Path(value)
    return tuple(value) if isinstance(value, list) else value
