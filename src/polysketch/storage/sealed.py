"""JSON objects that carry a digest of themselves, so that damage to a number in them is found."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SEAL = "sha256"
_LENGTH = 64


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The object with the sha256 of all that is in it."""
    return {**values, SEAL: _digest(values)}


def unsealed(values: dict[str, Any], origin: str) -> dict[str, Any]:
    """The object without its sha256, which is compared; one that has none was written by an earlier version.

    Args:
        values: what was read.
        origin: from where, for the message.

    Raises:
        ValueError: the sha256 is of something else.
    """
    if SEAL not in values and not any(_is_seal(name, values) for name in values):
        return values
    if not _is_seal(SEAL, values):  # or the name of the entry is what was changed
        raise ValueError(
            f"{origin}: expected the content that its own sha256 states, found another: the file is damaged, or was "
            f"changed by hand; take the entry {SEAL} out if that was on purpose"
        )
    return _without(SEAL, values)


def _is_seal(name: str, values: Mapping[str, Any]) -> bool:
    """Whether an entry is the sha256 of all others."""
    value = values.get(name)
    return isinstance(value, str) and len(value) == _LENGTH and value == _digest(_without(name, values))


def _without(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {other: value for other, value in values.items() if other != name}


def _digest(values: Mapping[str, Any]) -> str:
    """Of the values, whatever the order of their names and the spaces between them."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
