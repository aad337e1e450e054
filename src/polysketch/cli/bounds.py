"""Numbers that no machine can use are refused before anything is made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

__all__ = ["check_numbers"]

_MOST = 2**63 - 1
_MOST_OF = {"threads": 1024, "workers": 1024, "num_samples": 10_000, "repeats": 100_000}
"""The most of some flags; beyond it a machine comes to a halt before anybody is told why."""


def check_numbers(flags: Any) -> None:
    """Refuse whole numbers that are absurdly large.

    Args:
        flags: a dataclass of flags, perhaps of a subcommand's.

    Raises:
        ValueError: naming the flag and its most.
    """
    for name, value in _numbers(flags):
        most = _MOST_OF.get(name, _MOST)
        if value > most:
            raise ValueError(f"--{name.replace('_', '-')}: expected at most {most:,}, found {value}")


def _numbers(flags: Any) -> Iterator[tuple[str, int]]:
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, int):
                yield field.name, one
