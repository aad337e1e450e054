"""The program of `learned_sketch.py` for networks that fit into shared memory: their weights are read once.

A program goes through many tiles. What is loaded before the loop and multiplied in it stays in shared memory; the
matrices come in blocks of hidden units, so that activations of one block at a time need registers.
"""

import triton
import triton.language as tl

from polysketch.ops.learned_sketch.triton.programs.networks import (
    load_down,
    load_up,
    load_values,
    scale_and_bias,
    standardize,
    store_pair,
    store_rows,
    twice_active,
)
from polysketch.ops.triton.programs.rows import row_places
from polysketch.ops.triton.programs.shared import as_operand


@triton.jit(do_not_specialize=["length", "rows", "tiles", "tiles_per_program", "programs"])
def learned_sketch_resident(
    values,
    weights,
    combined,
    grad,
    middles,
    output_grads,
    values_network, values_batch, values_head, values_token,
    length,
    rows,
    tiles,
    tiles_per_program,
    programs,
    HEADS: tl.constexpr,
    MAPS: tl.constexpr,
    PAIRS: tl.constexpr,
    SHARED: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MAP_WEIGHTS: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    INPUT_LANES: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: consecutive tiles of the rows of one map, one pair of networks. Arguments as of `learned_sketch`.

    With SHARED both networks take the same values, which are standardized once.
    """
    FIRST: tl.constexpr = 2 * INPUTS + HIDDEN * (INPUTS + SIZE)
    NETWORK: tl.constexpr = FIRST + (DEPTH - 1) * (2 * SIZE + 2 * HIDDEN * SIZE)
    number = tl.program_id(0)
    part = number % programs
    pair = (number // programs) % PAIRS
    owner = number // programs // PAIRS
    every = tl.cast(rows, tl.int64) * MAPS
    of_left = weights + owner * MAP_WEIGHTS + 2 * pair * NETWORK
    of_right = of_left + NETWORK
    left_values = values + 2 * tl.cast(pair, tl.int64) * values_network
    right_values = left_values + values_network

    left_held = load_network(of_left, INPUTS, SIZE, HIDDEN, DEPTH, DOT, INPUT_LANES, LANES, BLOCK)
    right_held = load_network(of_right, INPUTS, SIZE, HIDDEN, DEPTH, DOT, INPUT_LANES, LANES, BLOCK)
    for tile in range(part * tiles_per_program, tl.minimum((part + 1) * tiles_per_program, tiles)):
        of_row, place, seen = row_places(
            tile, owner, rows, length, values_batch, values_head, values_token, HEADS, MAPS, TOKENS
        )
        standard = load_standard(left_values, of_row, seen, INPUTS, INPUT_LANES)
        left_normed = affine(standard, of_left, INPUTS, PRECISION, DOT, INPUT_LANES)
        if not SHARED:
            standard = load_standard(right_values, of_row, seen, INPUTS, INPUT_LANES)
        right_normed = affine(standard, of_right, INPUTS, PRECISION, DOT, INPUT_LANES)
        left = held_network(
            left_normed, left_held, of_left + FIRST, middles, 2 * pair, place, every, seen,
            2 * PAIRS, SIZE, HIDDEN, ACTIVATION, FAST, PRECISION, DOT, LANES, TOKENS,
        )  # fmt: skip
        right = held_network(
            right_normed, right_held, of_right + FIRST, middles, 2 * pair + 1, place, every, seen,
            2 * PAIRS, SIZE, HIDDEN, ACTIVATION, FAST, PRECISION, DOT, LANES, TOKENS,
        )  # fmt: skip
        store_pair(left, right, combined, grad, output_grads, pair, every, place, seen, SIZE, FAST, LANES)


@triton.jit
def load_network(
    weights,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT: tl.constexpr,
    INPUT_LANES: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What `load_stage` loads of every stage."""
    FIRST: tl.constexpr = 2 * INPUTS + HIDDEN * (INPUTS + SIZE)
    stages = (load_stage(weights, INPUTS, SIZE, HIDDEN, DOT, INPUT_LANES, LANES, BLOCK),)
    for before in tl.static_range(DEPTH - 1):
        of_stage = weights + FIRST + before * (2 * SIZE + 2 * HIDDEN * SIZE)
        stages = stages + (load_stage(of_stage, SIZE, SIZE, HIDDEN, DOT, LANES, LANES, BLOCK),)  # type: ignore[assignment]  # noqa: RUF005
    return stages


@triton.jit
def load_stage(
    weights,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    DOT: tl.constexpr,
    INPUT_LANES: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blocks of both matrices of a stage."""
    ups = ()  # Triton unpacks no tuples into tuples
    downs = ()
    for start in tl.static_range(0, HIDDEN, BLOCK):
        ups = ups + (load_up(weights, start, INPUTS, HIDDEN, INPUT_LANES, BLOCK).to(DOT),)  # type: ignore[assignment]  # noqa: RUF005
        downs = downs + (load_down(weights, start, INPUTS, SIZE, HIDDEN, LANES, BLOCK).to(DOT),)  # type: ignore[assignment]  # noqa: RUF005
    return ups, downs


@triton.jit
def load_standard(values, of_row, seen, INPUTS: tl.constexpr, INPUT_LANES: tl.constexpr):
    """Standardized values of the rows of a tile."""
    standard, _inverse = standardize(load_values(values, of_row, seen, INPUTS, INPUT_LANES), INPUTS, INPUT_LANES)
    return standard


@triton.jit
def affine(
    standard, weights,
    INPUTS: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr, INPUT_LANES: tl.constexpr,
):  # fmt: skip
    """Standardized values by the scale and bias of a stage, rounded for its product.

    Scale and bias are small, and in the first cache: they are not worth the registers that holding them takes.
    """
    scale, bias = scale_and_bias(weights, INPUTS, INPUT_LANES)
    return as_operand(standard * scale[None, :] + bias[None, :], DOT, PRECISION)


@triton.jit
def held_network(
    normed,
    held,
    later_weights,
    middles,
    index,
    place,
    every,
    seen,
    NETWORKS: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """`network` of `networks.py` of normed values, given what `load_network` loaded."""
    output = held_stage(normed, held[0], ACTIVATION, FAST, PRECISION, DOT, LANES, TOKENS)
    for before in tl.static_range(len(held) - 1):
        if middles is not None:
            store_rows(middles + (before * NETWORKS + index) * every * SIZE, place, output, seen, SIZE, LANES)
        standard, _inverse = standardize(output, SIZE, LANES)
        of_stage = later_weights + before * (2 * SIZE + 2 * HIDDEN * SIZE)
        later = affine(standard, of_stage, SIZE, PRECISION, DOT, LANES)
        output = held_stage(later, held[before + 1], ACTIVATION, FAST, PRECISION, DOT, LANES, TOKENS)
    return output.to(DOT)


@triton.jit
def held_stage(
    normed,
    held,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """`stage` of `networks.py` of normed values, given what `load_stage` loaded."""
    ups, downs = held
    total = tl.zeros((TOKENS, LANES), tl.float32)
    for block in tl.static_range(len(ups)):
        hidden = tl.dot(normed, tl.trans(ups[block]), input_precision=PRECISION)
        active, _bounded = twice_active(hidden, ACTIVATION, FAST)
        total = tl.dot(as_operand(active, DOT, PRECISION), tl.trans(downs[block]), total, input_precision=PRECISION)
    return 0.5 * total
