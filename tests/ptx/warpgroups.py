"""Products of four warps, `wgmma`: operands in shared memory by descriptors, or the first one in registers.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": "Register Fragments and Shared Memory Matrix
Layouts", "Matrix Descriptor Format" and "Canonical Layouts".
"""

from typing import NamedTuple

import numpy as np

from ptx.blocks import Blocks, implements
from ptx.formats import Array, floats
from ptx.matrices import first_operand, shape_of
from ptx.parsing import Fault, Instruction, registers_of
from ptx.products import Product
from ptx.shared_memory import UNIT

GROUP = 128
SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}
"""What the two highest bits of a descriptor say -> bytes over which rows are swizzled."""
_SHAPES = " ".join(f"m64n{n}k{k}" for n in range(8, 257, 8) for k in (8, 16))


class Layout(NamedTuple):
    """A matrix of `rows` (m or n) by `depth` (k) in shared memory.

    Attributes:
        size: bytes of an entry.
        by_rows: whether neighbours along the rows lie side by side ("MN-major"); else along the depth ("K-major").
    """

    rows: int
    depth: int
    size: int
    by_rows: bool


def units(descriptors: Array, layout: Layout) -> Array:
    """(descriptors, lines, units of a line) addresses of the 16 bytes each; lines are rows, or depth if `by_rows`."""
    field = lambda low: ((descriptors >> np.uint64(low)) & np.uint64(0x3FFF)).astype(np.int64)[:, None, None] << 4  # noqa: E731
    start, leading, stride = field(0), field(16), field(32)
    if ((descriptors >> np.uint64(49)) & np.uint64(7)).any():
        raise Fault("this executor does not know descriptors with a base offset")
    (mode,) = np.unique(descriptors >> np.uint64(62))
    swizzle = SWIZZLES[int(mode)]
    across = layout.rows if layout.by_rows else layout.depth
    line = np.arange(layout.depth if layout.by_rows else layout.rows)[:, None]
    unit = np.arange(across * layout.size // UNIT)
    return swizzled(start + _offset(line, unit, leading, stride, swizzle, layout.by_rows), swizzle)


def _offset(line: Array, unit: Array, leading: Array, stride: Array, swizzle: int, by_rows: bool) -> Array:
    """Of a unit of 16 bytes in a line, eight lines being a core matrix."""
    core, inside = line // 8, line % 8
    if swizzle == 0:
        of_unit, of_core = (stride, leading) if by_rows else (leading, stride)
        return core * of_core + inside * UNIT + unit * of_unit
    wide = swizzle // UNIT
    return core * stride + inside * swizzle + unit % wide * UNIT + unit // wide * leading


def swizzled(addresses: Array, swizzle: int) -> Array:
    """Bits 4 to 6 of an address, or the lowest two or one of them, XOR those from bit 7 on."""
    bits = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    return addresses ^ (((addresses >> 7) & bits) << 4)


@implements("wgmma", f"mma_async sync aligned fence commit_group wait_group {_SHAPES}")
def _warpgroup(blocks: Blocks, step: Instruction) -> None:
    if "fence" in step.parts:
        blocks.products.fence()
    elif "commit_group" in step.parts:
        blocks.products.commit()
    elif "wait_group" in step.parts:
        blocks.products.wait(int(step.operands[0]), blocks.shared)
    else:
        _multiply(blocks, step)


def _multiply(blocks: Blocks, step: Instruction) -> None:
    """D = A B, or A B + D where the fourth operand is true; signs and orders of the operands follow."""
    _, columns, depth = shape_of(step.parts)
    accumulators, in_registers = registers_of(step.operands[0]), step.operands[1][0] == "{"
    flags = [int(operand) for operand in step.operands[4:]]
    size = 4 if step.kind == "tf32" else 2
    orders = [0, *flags[2:]] if in_registers else flags[2:]
    first_by_rows, second_by_rows = (*map(bool, orders), False, False)[:2]
    if in_registers:
        operands, places = tuple(registers_of(step.operands[1])), []
        first = _from_registers(blocks, operands, step.kind, depth)
    else:
        operands = ()
        first, read = _from_memory(blocks, step.operands[1], Layout(64, depth, size, first_by_rows), step.kind)
        places = [read]
    second, read = _from_memory(blocks, step.operands[2], Layout(columns, depth, size, second_by_rows), step.kind)
    product = Product(".".join(step.parts), tuple(accumulators), operands, (*places, read))
    blocks.products.start(product)
    found = np.float32(flags[0] * flags[1]) * (first @ second.swapaxes(1, 2))
    _accumulate(blocks, accumulators, found, blocks.read(step.operands[3], "pred"))


def _accumulate(blocks: Blocks, registers: list[str], found: Array, goes_on: Array) -> None:
    """Register 4 i + j of a thread: columns 8 i + 2 (lane % 4) + j % 2, and eight rows further down for j >= 2."""
    thread = blocks.thread
    row, column = 16 * (thread // 32 % 4) + blocks.lane // 4, 2 * (blocks.lane % 4)
    for number, register in enumerate(registers):
        part = found[thread // GROUP, row + 8 * (number // 2 % 2), column + 8 * (number // 4) + number % 2]
        if goes_on.any():
            part = np.where(goes_on, part + blocks.registers[register].view(np.float32), part)
        blocks.write(register, part.astype(np.float32), by_product=True)


def _from_registers(blocks: Blocks, registers: tuple[str, ...], kind: str, depth: int) -> Array:
    """(warpgroups, 64, depth): sixteen rows of every warp, as `mma` has them."""
    found = np.zeros((blocks.total // 32, 16, depth), np.float32)
    warp, group, place = blocks.thread // 32, blocks.lane // 4, blocks.lane % 4
    given = [blocks.read_bits(register, "b32") for register in registers]
    for row, column, wide, entries in first_operand(given, kind):
        for each in range(wide):
            found[warp, row + group, column + wide * place + each] = entries[:, each]
    return found.reshape(-1, 64, depth)


def _from_memory(blocks: Blocks, operand: str, layout: Layout, kind: str) -> tuple[Array, Array]:
    """(warpgroups, rows, depth), and (blocks, n) addresses of what was read."""
    threads = blocks.read(operand, "b64").reshape(-1, GROUP)
    if (threads != threads[:, :1]).any():
        raise Fault(f"descriptor {operand} differs between the threads of a warpgroup")
    addresses = units(threads[:, 0], layout)
    read = addresses.reshape(len(blocks.numbers), -1)
    found = blocks.shared.multiply(read)
    (numbers,) = floats(found.view(np.uint16 if layout.size == 2 else np.uint32), kind)
    lines = numbers.astype(np.float32).reshape(*addresses.shape[:2], -1)
    return lines.swapaxes(1, 2) if layout.by_rows else lines, read
