"""What may be tuned: which programs a call asks constants for, and constants near those in use."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from polysketch.ops.triton import configurations

__all__ = ["Configuration", "Question", "candidates", "program_names", "questions_asked"]

Configuration = dict[str, int]

_WARPS = (4, 8)
_STAGES = (1, 2, 3, 4)
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 256  # tensor cores take no less than 16 rows


@dataclass(frozen=True)
class Question:
    """What `configuration` was asked, and what it answered.

    Attributes:
        program: its name.
        properties: of the call: widths, dtype, options.
        use: the constants in use.
    """

    program: str
    properties: dict[str, int | str]
    use: Configuration

    @property
    def key(self) -> tuple:
        """What makes it another question."""
        return self.program, tuple(sorted(self.properties.items()))


def candidates(base: Mapping[str, int]) -> list[Configuration]:
    """Other numbers of warps and stages; every block half and twice as large, with as many warps or fitting ones."""
    launches = [{**base, "num_warps": warps, "num_stages": stages} for warps in _WARPS for stages in _STAGES]
    blocks = [name for name in base if name.isupper()]
    resized = [
        {**base, name: size, "num_warps": warps}
        for name in blocks
        for size in (base[name] // 2, base[name] * 2)
        if min(base[name], _SMALLEST_BLOCK) <= size <= max(base[name], _LARGEST_BLOCK)
        for warps in {base["num_warps"], max(_WARPS) if size > base[name] else min(_WARPS)}
    ]
    distinct: list[Configuration] = []
    for one in [*launches, *resized]:
        if one != dict(base) and one not in distinct:
            distinct.append(one)
    return distinct


def program_names() -> list[str]:
    """Every program that has a file of configurations."""
    return sorted(file.stem for file in configurations.FOLDER.glob("*.json"))


@contextmanager
def questions_asked() -> Iterator[list[Question]]:
    """Within this block the list fills with what `configuration` is asked, each question once."""
    found: list[Question] = []

    def note(program: str, call: dict[str, Any], use: dict[str, Any]) -> None:
        question = Question(program, dict(call), dict(use))
        if question not in found:
            found.append(question)

    with configurations.observing(note):
        yield found
