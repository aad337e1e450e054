"""Execute a program of PTX on the CPU: all threads of all blocks of a launch in step.

Blocks that take another way at a branch go on by themselves. The threads of one block take the same way at every
branch: Triton's programs do, and another one is refused.
"""

import numpy as np

# What enters instructions into the table.
from ptx import arithmetic, matrices, movement, warpgroups  # noqa: F401
from ptx.blocks import Blocks, perform
from ptx.formats import Array
from ptx.global_memory import GlobalMemory
from ptx.parsing import Fault, Instruction, Program
from ptx.products import Products
from ptx.shared_memory import SharedMemory

AT_ONCE = 16
"""Blocks that are executed together."""


def execute(
    program: Program,
    blocks: int,
    threads: int,
    parameters: dict[str, int],
    memory: GlobalMemory,
    shared: int = 0,
    longest: int = 1_000_000,
) -> None:
    """Run a launch.

    Args:
        blocks, threads: of the grid, and of each block.
        parameters: name -> bits.
        memory: what the program may reach.
        shared: bytes of shared memory of a block.
        longest: instructions that blocks may take until they end or part.

    Raises:
        Fault: what no device allows, or what this executor does not know; names the instruction.
    """
    for start in range(0, blocks, AT_ONCE):
        numbers = np.arange(start, min(blocks, start + AT_ONCE))
        memories = SharedMemory(len(numbers), shared)
        waiting = [(0, Blocks(numbers, threads, parameters, memory, memories, {}, Products()))]
        while waiting:
            with np.errstate(all="ignore"):  # numbers may be infinite or NaN here, as on a device
                waiting += _run(program, *waiting.pop(), longest)


def _run(program: Program, at: int, blocks: Blocks, longest: int) -> list[tuple[int, Blocks]]:
    """From an instruction on to the end, or to a branch where blocks part: those that take it, and the others."""
    for _ in range(longest):
        if at >= len(program.instructions):
            return []
        step = program.instructions[at]
        try:
            blocks.active = _active(blocks, step)
            if step.name == "ret":
                return _after_return(at, blocks)
            if step.name != "bra":
                perform(blocks, step)
                at += 1
                continue
            taken = _blocks_that_branch(blocks)
        except Fault as fault:
            raise Fault(f"{program.name}, {step}: {fault}") from None
        target = program.labels[step.operands[0]]
        if taken.any() and not taken.all():
            return [(target, blocks.taken(taken)), (at + 1, blocks.taken(~taken))]
        at = target if taken.all() else at + 1
    raise Fault(f"{program.name} takes more than {longest} instructions")


def _active(blocks: Blocks, step: Instruction) -> Array | None:
    if step.guard is None:
        return None
    blocks.active = None
    guard = blocks.read(step.guard, "pred")
    return ~guard if step.negated else guard


def _blocks_that_branch(blocks: Blocks) -> Array:
    """Of every block whether all of its threads branch."""
    if blocks.active is None:
        return np.ones(len(blocks.numbers), bool)
    taken = blocks.active.reshape(-1, blocks.threads)
    if (taken != taken[:, :1]).any():
        raise Fault("the threads of a block part, which this executor does not know")
    return taken[:, 0]


def _after_return(at: int, blocks: Blocks) -> list[tuple[int, Blocks]]:
    """The blocks that do not return."""
    taken = _blocks_that_branch(blocks)
    return [] if taken.all() else [(at + 1, blocks.taken(~taken))]
