"""Between memories and registers, and between threads: loads, stores, copies, barriers and shuffles.

Source: PTX ISA, "Data Movement and Conversion Instructions" and "Parallel Synchronization and Communication
Instructions".
"""

import numpy as np

from ptx.blocks import Blocks, implements
from ptx.formats import UNSIGNED, Array, width
from ptx.parsing import Fault, Instruction, registers_of

_HINTS = "L1::evict_first L1::evict_last L1::evict_normal L1::no_allocate L2::cache_hint"


@implements("ld", f"param global shared cg v2 v4 {_HINTS}")
def _load(blocks: Blocks, step: Instruction) -> None:
    if step.parts[1] == "param":
        bits = blocks.parameters[step.operands[1].strip("[] ")] & ((1 << 8 * width(step.kind)) - 1)
        return blocks.write(step.operands[0], np.full(blocks.total, bits, UNSIGNED[width(step.kind)]))
    found = np.zeros((blocks.total, width(step.kind) * step.vector), np.uint8)
    threads = blocks.chosen()
    if len(threads):
        found[threads] = _bytes_at(blocks, step, threads, found.shape[1])
    pieces = found.view(UNSIGNED[width(step.kind)])
    for register, piece in zip(registers_of(step.operands[0]), pieces.T, strict=True):
        blocks.write(register, piece)
    return None


def _bytes_at(blocks: Blocks, step: Instruction, threads: Array, size: int) -> Array:
    addresses = blocks.address(step.operands[1])[threads]
    if step.parts[1] == "global":
        return blocks.memory.load(addresses.view(np.uint64), size)
    return blocks.shared.load(addresses, blocks.block[threads], size, blocks.accessor(threads))


@implements("st", f"global shared v2 v4 {_HINTS}")
def _store(blocks: Blocks, step: Instruction) -> None:
    pieces = [blocks.read_bits(register, step.kind) for register in registers_of(step.operands[1])]
    values = np.stack(pieces, 1).view(np.uint8)
    threads = blocks.chosen()
    if not len(threads):
        return
    addresses = blocks.address(step.operands[0])[threads]
    if step.parts[1] == "global":
        blocks.memory.store(addresses.view(np.uint64), values[threads])
    else:
        blocks.shared.store(addresses, blocks.block[threads], values[threads], blocks.accessor(threads))


@implements("cp", f"async ca cg shared global commit_group wait_group wait_all {_HINTS} L2::128B")
def _copy(blocks: Blocks, step: Instruction) -> None:
    """`cp.async` and the groups of copies; of a copy's bytes, those past its fourth operand are zero."""
    if "commit_group" in step.parts:
        return blocks.shared.commit_copies()
    if "wait_group" in step.parts:
        return blocks.shared.wait_for_copies(int(step.operands[0]))
    if "wait_all" in step.parts:
        raise Fault("this executor does not know cp.async.wait_all")
    threads = blocks.chosen()
    return _copied(blocks, step, threads) if len(threads) else None


def _copied(blocks: Blocks, step: Instruction, threads: Array) -> None:
    size = int(step.operands[2], 0)
    to, source = (blocks.address(operand)[threads] for operand in step.operands[:2])
    length = blocks.read(step.operands[3], "b32")[threads] if len(step.operands) > 3 else np.full(len(threads), size)
    if not np.isin(length, (0, size)).all():
        raise Fault("this executor knows copies of all bytes or of none")
    values = np.zeros((len(threads), size), np.uint8)
    values[length > 0] = blocks.memory.load(source[length > 0].view(np.uint64), size)
    blocks.shared.copy(to, blocks.block[threads], values, blocks.accessor(threads))


@implements("bar barrier", "sync warp cta aligned")
def _barrier(blocks: Blocks, step: Instruction) -> None:
    """Of all threads of a block, or of those of every warp."""
    _everyone(blocks)
    if "warp" in step.parts:
        return blocks.shared.warp_barrier()
    if step.operands != ("0",):
        raise Fault("this executor knows the barrier 0 of all threads alone")
    return blocks.shared.barrier()


@implements("fence", "proxy async shared::cta")
def _fence(blocks: Blocks, step: Instruction) -> None:
    _everyone(blocks)
    blocks.shared.fence()


def _everyone(blocks: Blocks) -> None:
    if blocks.active is not None and not blocks.active.all():
        raise Fault("not all threads come to what all have to come to")


@implements("shfl", "sync bfly idx up down")
def _shuffle(blocks: Blocks, step: Instruction) -> None:
    """A value of another lane of the warp: of lane XOR b, b, lane - b or lane + b; past the warp's end one's own."""
    _everyone(blocks)
    values, by = blocks.read_bits(step.operands[1], "b32"), blocks.read(step.operands[2], "b32").astype(np.int64)
    if int(step.operands[3], 0) not in (31, 0) or "|" in step.operands[0]:
        raise Fault("this executor knows shuffles of a whole warp and without a predicate alone")
    lane = blocks.lane
    lanes = {"bfly": lane ^ by, "idx": by & 31, "up": lane - by, "down": lane + by}
    other = lanes[step.parts[2]]
    other = np.where((other < 0) | (other > 31), lane, other)
    blocks.write(step.operands[0], values[blocks.thread - lane + other])


@implements("redux", "sync add min max")
def _reduce(blocks: Blocks, step: Instruction) -> None:
    """The sum, smallest or largest of a warp, in each of its lanes."""
    _everyone(blocks)
    if (blocks.read_bits(step.operands[2], "b32") != 0xFFFF_FFFF).any():
        raise Fault("this executor knows reductions of a whole warp alone")
    of_warp = blocks.read(step.operands[1], step.kind).reshape(-1, 32)
    combined = {"add": np.add, "min": np.minimum, "max": np.maximum}[step.parts[2]].reduce(of_warp, axis=1)
    blocks.write(step.operands[0], np.repeat(combined, 32).astype(of_warp.dtype))
