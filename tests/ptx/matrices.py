"""Matrices of a warp: `mma`, and `ldmatrix` and `stmatrix`, which bring 8 x 8 of them to and from shared memory.

Which thread holds which entry: PTX ISA, "Matrix Fragments for mma.m16n8k16", "Matrix Fragments for mma.m16n8k8", and
the tables of `ldmatrix` and `stmatrix`. A thread of a warp is named there by its group, lane / 4, and its number in it.
"""

from collections.abc import Iterator

import numpy as np

from ptx.blocks import Blocks, implements
from ptx.formats import Array, as_tf32, floats, halves, joined
from ptx.parsing import Fault, Instruction, registers_of
from ptx.shared_memory import together

_PACKED = {"bf16": "bf16x2", "f16": "f16x2"}


def shape_of(parts: tuple[str, ...]) -> tuple[int, int, int]:
    """(m, n, k) out of a word like m16n8k16."""
    word = next(part for part in parts if part[0] == "m" and "n" in part and "k" in part)
    m, _, rest = word[1:].partition("n")
    n, _, k = rest.partition("k")
    return int(m), int(n), int(k)


def first_operand(registers: list[Array], kind: str) -> Iterator[tuple[int, int, int, Array]]:
    """(first row, first column, columns a thread holds side by side, entries) of the fragment of 16 rows.

    Of registers in order, the second has the lower eight rows, the third and fourth the right half of the columns.
    """
    for number, bits in enumerate(registers):
        row = 8 * (number % 2)
        if kind == "tf32":
            yield row, 4 * (number // 2), 1, as_tf32(bits)[:, None]
        else:
            yield row, 8 * (number // 2), 2, np.stack(floats(bits, _PACKED[kind]), 1)


def _second_operand(registers: list[Array], kind: str) -> Iterator[tuple[int, int, Array]]:
    """(first row, rows a thread holds, entries) of the fragment of eight columns."""
    for number, bits in enumerate(registers):
        if kind == "tf32":
            yield 4 * number, 1, as_tf32(bits)[:, None]
        else:
            yield 8 * number, 2, np.stack(floats(bits, _PACKED[kind]), 1)


@implements("mma", "sync aligned m16n8k8 m16n8k16 row col")
def _multiply(blocks: Blocks, step: Instruction) -> None:
    """D = A B + C of every warp, A 16 x k by rows, B k x 8 by columns, sums in float32."""
    kinds = step.parts[-4:]
    if kinds[0] != "f32" or kinds[3] != "f32" or kinds[1] != kinds[2]:
        raise Fault("this executor knows mma with sums in float32 alone")
    _, _, depth = shape_of(step.parts)
    vectors = [[blocks.read_bits(each, "b32") for each in registers_of(operand)] for operand in step.operands[1:]]
    warp, group, place = blocks.thread // 32, blocks.lane // 4, blocks.lane % 4
    first = np.zeros((blocks.total // 32, 16, depth), np.float32)
    second = np.zeros((blocks.total // 32, depth, 8), np.float32)
    for row, column, wide, entries in first_operand(vectors[0], kinds[1]):
        for each in range(wide):
            first[warp, row + group, column + wide * place + each] = entries[:, each]
    for row, high, entries in _second_operand(vectors[1], kinds[1]):
        for each in range(high):
            second[warp, row + high * place + each, group] = entries[:, each]
    found = first @ second
    for number, (register, bits) in enumerate(zip(registers_of(step.operands[0]), vectors[2], strict=True)):
        entries = found[warp, group + 8 * (number // 2), 2 * place + number % 2]
        blocks.write(register, entries + bits.view(np.float32))


_SHAPES = "sync aligned m8n8 x1 x2 x4 trans shared"


@implements("ldmatrix", _SHAPES)
def _load(blocks: Blocks, step: Instruction) -> None:
    """Matrices out of rows of 16 bytes: lanes 8 i to 8 i + 7 have the addresses of the rows of matrix i."""
    addresses, registers = blocks.address(step.operands[1]), registers_of(step.operands[0])
    warp, row, pair = blocks.thread // 32, blocks.lane // 4, blocks.lane % 4
    for number, register in enumerate(registers):
        threads, warps = _row_threads(blocks, number)
        rows = blocks.shared.load(addresses[threads], blocks.block[threads], 16, together(warps))
        matrix = rows.view(np.uint16).reshape(-1, 8, 8)
        if "trans" in step.parts:
            matrix = matrix.swapaxes(1, 2)
        blocks.write(register, joined(matrix[warp, row, 2 * pair], matrix[warp, row, 2 * pair + 1]))


@implements("stmatrix", _SHAPES)
def _store(blocks: Blocks, step: Instruction) -> None:
    """The reverse of `ldmatrix`."""
    addresses, registers = blocks.address(step.operands[0]), registers_of(step.operands[1])
    warp, row, pair = blocks.thread // 32, blocks.lane // 4, blocks.lane % 4
    for number, register in enumerate(registers):
        matrix = np.zeros((blocks.total // 32, 8, 8), np.uint16)
        matrix[warp, row, 2 * pair], matrix[warp, row, 2 * pair + 1] = halves(blocks.read_bits(register, "b32"))
        if "trans" in step.parts:
            matrix = matrix.swapaxes(1, 2)
        threads, warps = _row_threads(blocks, number)
        rows = np.ascontiguousarray(matrix).reshape(-1, 8).view(np.uint8)
        blocks.shared.store(addresses[threads], blocks.block[threads], rows, together(warps))


def _row_threads(blocks: Blocks, number: int) -> tuple[Array, Array]:
    """Of every warp the threads that have the addresses of matrix `number`, and the warp of each in its block."""
    warps = np.arange(blocks.total // 32)
    threads = 32 * warps[:, None] + 8 * number + np.arange(8)
    return threads.reshape(-1), (warps % (blocks.threads // 32)).repeat(8)
