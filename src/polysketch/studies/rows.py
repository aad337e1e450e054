"""What a row of a study is called: `name`, or `name+option=value+option=value`."""

import ast
from typing import Any

_WORDS = {"none": None, "true": True, "false": False}


def parsed(row: str) -> tuple[str, dict[str, Any]]:
    """Name and options; values are numbers, tuples, none, true, false or words.

    Raises:
        ValueError: a part without `=`.
    """
    name, *given = row.split("+")
    pairs = [one.partition("=") for one in given]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(f"expected a row name+option=value, found {row!r}")
    return name, {option: _value(text) for option, _, text in pairs}


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
