"""Blocks of one launch that stand at the same instruction: registers of all their threads, and what they reach."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ptx.formats import TYPES, UNSIGNED, Array, raw, width
from ptx.global_memory import GlobalMemory
from ptx.parsing import Fault, Instruction
from ptx.products import Products
from ptx.shared_memory import Accessor, SharedMemory, single

_ADDRESS = re.compile(r"(%?\w+)\s*(?:\+\s*(-?\w+))?$")
_UNSET = 0xFFFF_FFFF_FFFF_FFFF
"""In registers of threads that a guard left out: NaN in every floating-point type, and no address."""


@dataclass
class Blocks:
    """Threads are numbered through all blocks; a value has one entry for each.

    Attributes:
        numbers: of the blocks in the grid, along its first axis.
        threads: of each.
        parameters: name -> bits.
        registers: name -> raw bits.
        active: threads that do the present instruction; None where all do.
    """

    numbers: Array
    threads: int
    parameters: dict[str, int]
    memory: GlobalMemory
    shared: SharedMemory
    registers: dict[str, Array]
    products: Products
    active: Array | None = None

    @property
    def total(self) -> int:
        """Threads of all blocks."""
        return len(self.numbers) * self.threads

    @property
    def thread(self) -> Array:
        """Number of each."""
        return np.arange(self.total)

    @property
    def lane(self) -> Array:
        """Number of each in its warp."""
        return self.thread % 32

    @property
    def block(self) -> Array:
        """Number among these blocks, of each thread."""
        return self.thread // self.threads

    def taken(self, chosen: Array) -> "Blocks":
        """Some of the blocks, by a truth value for each, with memories of their own."""
        rows = lambda x: x.reshape(-1, self.threads)[chosen].reshape(-1)  # noqa: E731
        registers = {name: rows(x) for name, x in self.registers.items()}
        shared = self.shared.taken(chosen)
        products = self.products.taken(chosen)
        return replace(self, numbers=self.numbers[chosen], registers=registers, shared=shared, products=products)

    # Operands.

    def read(self, operand: str, kind: str) -> Array:
        """Values of an operand, as that type has them."""
        values = self._bits(operand, kind)
        if kind == "pred":
            return values.astype(bool)
        size = width(kind)
        if values.dtype.itemsize != size:
            values = values.astype(UNSIGNED[size])
        return values.view(TYPES[kind])

    def read_bits(self, operand: str, kind: str) -> Array:
        """Raw bits of an operand."""
        return raw(self.read(operand, kind))

    def _bits(self, operand: str, kind: str) -> Array:
        values = self.registers.get(operand)
        if values is not None:
            self.products.check_read(operand)
            return values
        if operand in _SPECIAL:
            return _SPECIAL[operand](self).astype(np.uint32)
        if operand[0] == "%":
            raise Fault(f"read of register {operand}, which nobody wrote")
        return np.broadcast_to(_immediate(operand, kind), (self.total,))

    def write(self, operand: str, values: Array, *, by_product: bool = False) -> None:
        """Into a register, of those threads that are active."""
        if operand == "_":
            return
        if not by_product:
            self.products.check_write(operand)
        values = raw(values)
        if self.active is not None and not self.active.all():
            values = np.where(self.active, values, self._before(operand, values.dtype))
        self.registers[operand] = values

    def _before(self, operand: str, kind: np.dtype) -> Array:
        before = self.registers.get(operand)
        unset = kind.type(kind == np.bool_ or _UNSET & ((1 << 8 * kind.itemsize) - 1))
        return np.full(self.total, unset) if before is None else before.astype(kind)

    def address(self, operand: str) -> Array:
        """(threads,) int64 of an operand in brackets: a register or `global_smem`, and an offset."""
        found = _ADDRESS.match(operand.strip("[] \t"))
        if found is None:
            raise Fault(f"no address: {operand}")
        base, offset = found[1], int(found[2] or "0", 0)
        if base == "global_smem":
            return np.full(self.total, offset, np.int64)
        start = self.registers.get(base)
        if start is None:
            raise Fault(f"address in register {base}, which nobody wrote")
        return start.astype(np.int64) + offset

    def chosen(self) -> Array:
        """Numbers of the active threads."""
        return self.thread if self.active is None else np.flatnonzero(self.active)

    def accessor(self, threads: Array) -> Accessor:
        """Each of these threads for itself."""
        return single(threads % self.threads)


_SPECIAL: dict[str, Callable[[Blocks], Array]] = {
    "%tid.x": lambda blocks: blocks.thread % blocks.threads,
    "%tid.y": lambda blocks: np.zeros(blocks.total),
    "%tid.z": lambda blocks: np.zeros(blocks.total),
    "%ntid.x": lambda blocks: np.full(blocks.total, blocks.threads),
    "%ctaid.x": lambda blocks: blocks.numbers.repeat(blocks.threads),
    "%ctaid.y": lambda blocks: np.zeros(blocks.total),
    "%ctaid.z": lambda blocks: np.zeros(blocks.total),
    "%laneid": lambda blocks: blocks.lane,
}


def _immediate(operand: str, kind: str) -> Array:
    """A number as written: decimal, 0x, or the bits of a float32 (0f) or a float64 (0d)."""
    if operand == "global_smem":
        return np.zeros((), UNSIGNED[width(kind)])
    if operand[:2] in ("0f", "0d", "0F", "0D"):
        return np.array(int(operand[2:], 16), UNSIGNED[(len(operand) - 2) // 2])
    number = int(operand.removesuffix("U"), 0)
    if kind == "pred":
        return np.array(number != 0)
    return np.array(number & ((1 << 8 * width(kind)) - 1), UNSIGNED[width(kind)])


Implementation = Callable[[Blocks, Instruction], None]
IMPLEMENTATIONS: dict[str, tuple[Implementation, frozenset[str]]] = {}
"""First word of an opcode -> what it does, and the other words that this knows."""


def implements(names: str, words: str = "") -> Callable[[Implementation], Implementation]:
    """Enter a function into `IMPLEMENTATIONS`; types are always known, other words are `words`."""

    def enter(function: Implementation) -> Implementation:
        for name in names.split():
            IMPLEMENTATIONS[name] = function, frozenset([name, *words.split(), *TYPES])
        return function

    return enter


def perform(blocks: Blocks, instruction: Instruction) -> None:
    """What an instruction does that is no branch."""
    _implementation(instruction.parts)(blocks, instruction)


@cache
def _implementation(parts: tuple[str, ...]) -> Implementation:
    """What does instructions of this opcode, every word of which it has to know."""
    if parts[0] not in IMPLEMENTATIONS:
        raise Fault(f"this executor does not know {parts[0]}")
    function, words = IMPLEMENTATIONS[parts[0]]
    unknown = [part for part in parts if part not in words]
    if unknown:
        raise Fault(f"this executor does not know {'.'.join(unknown)} of {parts[0]}")
    return function
