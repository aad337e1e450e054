"""ListOps: the value of nested lists of digits, as Long Range Arena draws them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from polysketch.tasks.base import GeneratedTask
from polysketch.tasks.batch import Row

_OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(np.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
SYMBOLS = ("", *map(str, range(10)), *_OPERATORS, "]")
"""The symbol of each id; 0 is padding."""

_LIST_SHARE = 0.25  # of the places that may hold a list


@dataclass(frozen=True, kw_only=True)
class ListOps(GeneratedTask):
    """A list begins with an operator, ends with a bracket, and holds digits and lists; the class is its value, a digit.

    Operators are the smallest, the largest, the median (rounded down) and the sum modulo 10. The task of Nangia and
    Bowman (2018) at the sizes of Long Range Arena (Tay et al. 2021): a list has 2 to 10 entries, and an entry is a list
    with probability 1/4, down to a depth of 10. Rows of fewer than 500 or more than 2,000 symbols are drawn again. Two
    departures: brackets stand for themselves, without the parentheses of that benchmark's files, which its readers
    delete; and values are not balanced.

    Attributes:
        shortest, length: symbols of the shortest and of the longest row.
        depth: of lists in lists, at most.
        entries: of a list, at most.
    """

    name = "listops"
    asks = "class"
    shortest: int = 500
    length: int = 2000
    depth: int = 10
    entries: int = 10

    @property
    def vocab_size(self) -> int:
        """Digits, operators, the bracket, and 0."""
        return len(SYMBOLS)

    @property
    def num_classes(self) -> int:
        """The digits."""
        return 10

    def make(self, generator: np.random.Generator) -> Row:
        """As the base class has it."""
        if self.depth < 1 or self.entries < 2 or not 1 <= self.shortest <= self.length:
            raise ValueError(
                f"expected a depth from 1 on, 2 entries or more and 1 <= shortest <= length, found {self.depth}, "
                f"{self.entries}, {self.shortest} and {self.length}"
            )
        for _ in range(_TRIES):
            symbols: list[str] = []
            value = self._draw(generator, 1, symbols)
            if self.shortest <= len(symbols) <= self.length:
                return Row(encoded(symbols), value)
        raise ValueError(
            f"no list of {self.shortest} to {self.length} symbols among {_TRIES:,} of a depth of {self.depth} with up "
            f"to {self.entries} entries: allow other lengths"
        )

    def _draw(self, generator: np.random.Generator, depth: int, symbols: list[str]) -> int:
        """Add an entry to the symbols, at most `length` + 1 of them; returns its value."""
        if depth > self.depth or len(symbols) > self.length or (generator.random() >= _LIST_SHARE and depth > 1):
            value = int(generator.integers(10))
            symbols.append(str(value))
            return value
        operator = list(_OPERATORS)[generator.integers(len(_OPERATORS))]
        symbols.append(operator)
        values = [self._draw(generator, depth + 1, symbols) for _ in range(generator.integers(2, self.entries + 1))]
        symbols.append("]")
        return _OPERATORS[operator](values)


_TRIES = 10_000


def encoded(symbols: list[str]) -> np.ndarray:
    """The ids of symbols.

    Raises:
        ValueError: another symbol.
    """
    unknown = sorted(set(symbols) - set(SYMBOLS[1:]))
    if unknown:
        raise ValueError(f"expected symbols {' '.join(SYMBOLS[1:])}, found {unknown[0]!r}")
    return np.array([SYMBOLS.index(symbol) for symbol in symbols])
