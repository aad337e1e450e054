"""What stands in the machine code of a program, as cuobjdump lists it.

Besides counting instructions, one fault of assemblers is looked for: a uniform register that is read on some way
through the program before any instruction wrote it. The addresses that matrix products read shared memory from are made
in such registers.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?PT?\d*)\s+)?(\S+?)((?:\s[^;]*)?);", re.MULTILINE)
_UNIFORM = re.compile(r"([gi]?desc\[)?\bUR(\d+)\b(\.64)?")
_ALWAYS = {"", "PT", "UPT"}
_WRITES_UNIFORM = {"R2UR", "S2UR", "VOTEU", "REDUX", "CREDUX", "LDCU"}
"""Of the instructions without a U before their name, those whose result is a uniform register."""


class Instruction(NamedTuple):
    """One line of a listing.

    Attributes:
        address: of the instruction.
        guard: the predicate that it is executed under, "" for none.
        name: with its suffixes.
        operands: as they are written.
    """

    address: int
    guard: str
    name: str
    operands: tuple[str, ...]

    @property
    def word(self) -> str:
        """The name without suffixes."""
        return self.name.partition(".")[0]

    @property
    def suffixes(self) -> set[str]:
        """Those of the name."""
        return set(self.name.split(".")[1:])

    @property
    def written(self) -> set[int]:
        """Numbers of the uniform registers that it writes."""
        place = self._place_of_result
        return set() if place is None else self._registers(place)

    @property
    def read(self) -> set[int]:
        """Numbers of the uniform registers that it reads."""
        return {
            number
            for place in range(len(self.operands))
            if place != self._place_of_result
            for number in self._registers(place)
        }

    @property
    def _place_of_result(self) -> int | None:
        """Where among the operands the uniform register stands that is written; predicates may come before it."""
        if not (self.word.startswith("U") or self.word in _WRITES_UNIFORM):
            return None
        places = (place for place, operand in enumerate(self.operands) if not re.fullmatch(r"!?U?P(T|\d)", operand))
        first = next(places, None)
        return first if first is not None and re.fullmatch(r"UR\d+", self.operands[first]) else None

    def _registers(self, place: int) -> set[int]:
        """Those that an operand means: a register named may be the first of a pair, or of the four of a descriptor."""
        found = set()
        for before, number, after in _UNIFORM.findall(self.operands[place]):
            begin, count = self._span(place, before, after)
            found |= {int(number) + begin + more for more in range(count)}
        return found

    def _span(self, place: int, before: str, after: str) -> tuple[int, int]:
        """Which registers from the named one on: how many to leave out, and how many there are."""
        if before == "gdesc[" and self.word.startswith("UTC"):
            return 0, 2  # products of the tensor memory name each factor
        if before == "gdesc[":
            # Two for each factor of the product; the first two are not looked at where the first is in registers.
            in_registers = len(self.operands) > 1 and re.match(r"R\d", self.operands[1])
            return (2, 2) if in_registers else (0, 4)
        if self.word == "LDCU" and place == self._place_of_result:  # a load of so many bits
            return 0, next((count for bits, count in (("128", 4), ("64", 2)) if bits in self.suffixes), 1)
        pair = before == "desc[" or after == ".64" or (self.word.startswith("U") and "64" in self.suffixes)
        # A wide product has a pair as its result, and adds a pair.
        wide = "WIDE" in self.suffixes and place in (self._place_of_result, len(self.operands) - 1)
        return 0, 2 if pair or wide else 1

    def __str__(self) -> str:
        return f"{self.address:#x} {self.name} {', '.join(self.operands)}"


class Listing:
    """A program's instructions, in order."""

    def __init__(self, text: str) -> None:
        self.instructions = [
            Instruction(int(address, 16), guard, name, _operands(rest))
            for address, guard, name, rest in _LINE.findall(text)
        ]

    @cached_property
    def unset_reads(self) -> list[str]:
        """Instructions that read a uniform register which on some way to them nothing wrote."""
        found = []
        for place, instruction in enumerate(self.instructions):
            set_before = self._set_before[place]
            unset = set() if set_before is None else instruction.read - set_before
            found += [f"UR{number} is unset at {instruction}" for number in sorted(unset)]
        return found

    @cached_property
    def _set_before(self) -> list[frozenset[int] | None]:
        """Before each instruction the uniform registers that every way to it has written; None where none leads to."""
        before: list[frozenset[int] | None] = [None] * len(self.instructions)
        waiting = [(0, frozenset[int]())] if self.instructions else []
        while waiting:
            place, reached = waiting.pop()
            known = before[place]
            together = reached if known is None else known & reached
            if together == known:
                continue
            before[place] = together
            after = together | self.instructions[place].written
            waiting += [(following, after) for following in self._following(place)]
        return before

    def _following(self, place: int) -> Iterator[int]:
        instruction = self.instructions[place]
        leaves = instruction.word in ("BRA", "EXIT", "RET")
        if instruction.word == "BRA":
            target = self._places.get(int(instruction.operands[-1], 16))
            if target is not None:
                yield target
        # A branch may name a predicate of all threads beside its target.
        conditional = instruction.guard not in _ALWAYS or len(instruction.operands) > 1
        if (not leaves or conditional) and place + 1 < len(self.instructions):
            yield place + 1

    @cached_property
    def _places(self) -> dict[int, int]:
        return {instruction.address: place for place, instruction in enumerate(self.instructions)}


def _operands(rest: str) -> tuple[str, ...]:
    """Split at the commas."""
    return tuple(part.strip() for part in rest.split(",") if part.strip())
