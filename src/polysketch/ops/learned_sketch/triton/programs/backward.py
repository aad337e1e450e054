"""Gradients of a stage (LN, up, activation, down) of the networks of the learned sketch: of its inputs, of its weights.

Both programs make the hidden activations again. The first goes through all hidden units for a tile of rows; the second
holds the gradients of a slice of hidden units in registers and goes through a span of tiles.
"""

import triton
import triton.language as tl

from polysketch.ops.learned_sketch.triton.programs.networks import (
    CUBIC,
    LINEAR,
    SILU,
    load_down,
    load_up,
    load_values,
    scale_and_bias,
    standardize,
    store_rows,
    twice_active,
)
from polysketch.ops.triton.programs.rows import row_places
from polysketch.ops.triton.programs.shared import as_operand


@triton.jit(do_not_specialize=["length", "rows", "tiles"])
def learned_sketch_inputs_backward(
    values,
    weights,
    grad,
    grad_values,
    values_network, values_batch, values_head, values_token,
    length,
    rows,
    tiles,
    HEADS: tl.constexpr,
    MAPS: tl.constexpr,
    NETWORKS: tl.constexpr,
    SHARED: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NETWORK_WEIGHTS: tl.constexpr,
    MAP_WEIGHTS: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    INPUT_LANES: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the rows of one map, and the SHARED networks that take the same input.

    grad (NETWORKS, batch, HEADS, length, SIZE), of the stage's outputs; grad_values the same with INPUTS, and
    NETWORKS / SHARED; both contiguous. weights begin with this stage of the level's first network.
    """
    number = tl.program_id(0)
    tile = number % tiles
    taken = (number // tiles) % (NETWORKS // SHARED)
    owner = number // tiles // (NETWORKS // SHARED)
    of_row, place, seen = row_places(
        tile, owner, rows, length, values_batch, values_head, values_token, HEADS, MAPS, TOKENS
    )
    every = tl.cast(rows, tl.int64) * MAPS

    inputs = load_values(values + tl.cast(taken, tl.int64) * values_network, of_row, seen, INPUTS, INPUT_LANES)
    standard, inverse = standardize(inputs, INPUTS, INPUT_LANES)
    grad_standard = tl.zeros((TOKENS, INPUT_LANES), tl.float32)
    for index in range(taken * SHARED, (taken + 1) * SHARED):
        of_stage = weights + owner * MAP_WEIGHTS + index * NETWORK_WEIGHTS
        scale, bias = scale_and_bias(of_stage, INPUTS, INPUT_LANES)
        normed = as_operand(standard * scale[None, :] + bias[None, :], DOT, PRECISION)
        grad_output = load_values(grad + index * every * SIZE, place * SIZE, seen, SIZE, LANES).to(DOT)
        grad_normed = tl.zeros((TOKENS, INPUT_LANES), tl.float32)
        for start in range(0, HIDDEN, BLOCK):
            up = load_up(of_stage, start, INPUTS, HIDDEN, INPUT_LANES, BLOCK).to(DOT)
            down = load_down(of_stage, start, INPUTS, SIZE, HIDDEN, LANES, BLOCK).to(DOT)
            hidden = tl.dot(normed, tl.trans(up), input_precision=PRECISION)
            grad_active = tl.dot(grad_output, down, input_precision=PRECISION)
            _active, slope = twice_active_and_slope(hidden, ACTIVATION, FAST)
            grad_normed = tl.dot(
                as_operand(grad_active * slope, DOT, PRECISION), up, grad_normed, input_precision=PRECISION
            )
        grad_standard += grad_normed * (0.5 * scale)[None, :]
    mean = tl.sum(grad_standard, 1) * (1.0 / INPUTS)
    along = tl.sum(grad_standard * standard, 1) * (1.0 / INPUTS)
    found = (grad_standard - mean[:, None] - standard * along[:, None]) * inverse[:, None]
    store_rows(grad_values + taken * every * INPUTS, place, found, seen, INPUTS, INPUT_LANES)


@triton.jit(do_not_specialize=["length", "rows", "tiles", "tiles_per_span", "spans", "slices"])
def learned_sketch_weights_backward(
    values,
    weights,
    grad,
    norms,
    matrices,
    values_network, values_batch, values_head, values_token,
    length,
    rows,
    tiles,
    tiles_per_span,
    spans,
    slices,
    HEADS: tl.constexpr,
    MAPS: tl.constexpr,
    NETWORKS: tl.constexpr,
    SHARED: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NETWORK_WEIGHTS: tl.constexpr,
    MAP_WEIGHTS: tl.constexpr,
    NETWORK_NORMS: tl.constexpr,
    NETWORK_MATRICES: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    INPUT_LANES: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK hidden units of one network, one span of the tiles of its map.

    Hidden units are rows here and tokens columns, so that the products over tokens take activations out of registers.
    The scale of the norm comes in with the first matrix, so that the gradients of norm and matrix both follow from two
    sums over the span: of the gradient of hidden activations, and of it times the standardized inputs.

    norms (spans, MAPS, NETWORKS, slices, NETWORK_NORMS), of BLOCK hidden units each, and matrices (spans, MAPS,
    NETWORKS, NETWORK_MATRICES), float32, begin with this stage of a network, whose weights stand there in their order.
    """
    SLICES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    number = tl.program_id(0)
    part = number % SLICES
    start = part * BLOCK
    index = (number // SLICES) % NETWORKS
    span = (number // SLICES // NETWORKS) % spans
    owner = number // SLICES // NETWORKS // spans
    every = tl.cast(rows, tl.int64) * MAPS

    of_stage = weights + owner * MAP_WEIGHTS + index * NETWORK_WEIGHTS
    scale, bias = scale_and_bias(of_stage, INPUTS, INPUT_LANES)
    raw = load_up(of_stage, start, INPUTS, HIDDEN, INPUT_LANES, BLOCK).to(tl.float32)
    up = as_operand(raw * scale[None, :], DOT, PRECISION)
    constant = tl.sum(raw * bias[None, :], 1)
    down = tl.trans(load_down(of_stage, start, INPUTS, SIZE, HIDDEN, LANES, BLOCK)).to(DOT)
    of_values = values + tl.cast(index // SHARED, tl.int64) * values_network
    of_grad = grad + index * every * SIZE

    up_sum = tl.zeros((BLOCK, INPUT_LANES), tl.float32)
    down_sum = tl.zeros((BLOCK, LANES), tl.float32)
    hidden_sum = tl.zeros((BLOCK,), tl.float32)
    for tile in range(span * tiles_per_span, tl.minimum((span + 1) * tiles_per_span, tiles)):
        of_row, place, seen = row_places(
            tile, owner, rows, length, values_batch, values_head, values_token, HEADS, MAPS, TOKENS
        )
        inputs = load_values(of_values, of_row, seen, INPUTS, INPUT_LANES)
        standard, _inverse = standardize(inputs, INPUTS, INPUT_LANES)
        standard = as_operand(standard, DOT, PRECISION)
        # Rows past the end have no gradient, and add nothing.
        grad_output = load_values(of_grad, place * SIZE, seen, SIZE, LANES).to(DOT)
        hidden = tl.dot(up, tl.trans(standard), input_precision=PRECISION) + constant[:, None]
        grad_active = tl.dot(down, tl.trans(grad_output), input_precision=PRECISION)
        active, slope = twice_active_and_slope(hidden, ACTIVATION, FAST)
        down_sum = tl.dot(as_operand(active, DOT, PRECISION), grad_output, down_sum, input_precision=PRECISION)
        grad_hidden = grad_active * slope
        hidden_sum += tl.sum(grad_hidden, 1)
        up_sum = tl.dot(as_operand(grad_hidden, DOT, PRECISION), standard, up_sum, input_precision=PRECISION)

    row = ((span * MAPS + owner) * NETWORKS + index).to(tl.int64)
    of_matrices = matrices + row * NETWORK_MATRICES
    units = tl.arange(0, BLOCK)
    there = units < HIDDEN - start
    store_columns(of_matrices + HIDDEN * INPUTS + start, 0.5 * down_sum, there, SIZE, HIDDEN, LANES, BLOCK)
    # Read again, after a store: kept since the first time they would take registers.
    scale, bias = scale_and_bias(of_stage, INPUTS, INPUT_LANES)
    up_sum = 0.5 * up_sum
    hidden_sum = 0.5 * hidden_sum
    found = up_sum * scale[None, :] + hidden_sum[:, None] * bias[None, :]
    store_rows(of_matrices + start * INPUTS, units, found, there, INPUTS, INPUT_LANES)
    up = load_values(of_stage + (2 + start) * INPUTS, units * INPUTS, there, INPUTS, INPUT_LANES)
    of_norms = norms + (row * slices + part) * NETWORK_NORMS
    store_norm(of_norms, tl.sum(up * up_sum, 0), tl.sum(up * hidden_sum[:, None], 0), INPUTS, INPUT_LANES)


@triton.jit
def store_norm(pointer, of_scale, of_bias, INPUTS: tl.constexpr, LANES: tl.constexpr):
    """Write the gradients of a norm where `scale_and_bias` would read its weights."""
    columns = tl.arange(0, LANES)
    tl.store(pointer + columns, of_scale, columns < INPUTS)
    tl.store(pointer + INPUTS + columns, of_bias, columns < INPUTS)


@triton.jit
def store_columns(
    pointer, tile, there,
    SIZE: tl.constexpr, HIDDEN: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write those rows of a tile (BLOCK, LANES) that are there as columns of (SIZE, HIDDEN)."""
    rows = tl.arange(0, LANES)
    mask = there[:, None] & (rows < SIZE)[None, :]
    tl.store(pointer + rows[None, :] * HIDDEN + tl.arange(0, BLOCK)[:, None], tile, mask)


@triton.jit
def twice_active_and_slope(x, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """What `twice_active` has, x (1 + t), and its derivative: 1 + t + x (1 + t) (1 - t) z', without z for a sign t."""
    active, bounded = twice_active(x, ACTIVATION, FAST)
    if ACTIVATION == "relu":
        return active, 1 + bounded
    if ACTIVATION == "silu":
        return active, 1 + bounded + active * (SILU - SILU * bounded)
    return active, 1 + bounded + (active - active * bounded) * (LINEAR + 3 * CUBIC * (x * x))
