"""JSON as the standard has it: there are no infinite numbers in it, and none that are not numbers."""

import json
import math
from collections.abc import Mapping
from typing import Any


def encoded(value: Any, *, indent: int | None = None) -> bytes:
    """A value and a line break; numbers that are not finite become null, at any depth."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
