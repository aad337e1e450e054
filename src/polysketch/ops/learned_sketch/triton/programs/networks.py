"""The networks of the learned sketch: a tile of rows through a pair of networks, their product, tanh.

A stage of a network is LN, up, activation, down. Its hidden activations are made for a block of hidden units at a time
and multiplied at once by their part of the second matrix, so that they never leave the registers. The weights of a
stage lie one after another in memory (norm scale, norm bias, up, down), stages and networks too.
"""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.rows import row_places
from polysketch.ops.triton.programs.shared import as_float32, as_operand

EPSILON = tl.constexpr(1e-5)
LINEAR = tl.constexpr(0.7978845608028654)  # of the argument of the tanh in GELU: sqrt(2 / pi)
CUBIC = tl.constexpr(0.035677408136300125)  # 0.044715 sqrt(2 / pi)
SILU = tl.constexpr(0.5)  # of the argument of the tanh in SiLU


@triton.jit(do_not_specialize=["length", "rows", "tiles"])
def learned_sketch(
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
    HEADS: tl.constexpr,
    MAPS: tl.constexpr,
    PAIRS: tl.constexpr,
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
    """One program: a tile of the rows of one map, one pair of networks.

    Rows of a map are those of its HEADS / MAPS heads, counted batch by batch, head by head. values of network n begin
    at n values_network, with (batch, head, token) strides. combined, grad (PAIRS, batch, HEADS, length, SIZE),
    output_grads (2 PAIRS, batch, HEADS, length, SIZE) and middles (DEPTH - 1, ., ., ., ., SIZE), contiguous. With grad,
    the gradient of combined, the program writes what the backward pass of the stages needs: what all but the last put
    out, and the gradients of what the last puts out.
    """
    number = tl.program_id(0)
    tile = number % tiles
    pair = (number // tiles) % PAIRS
    owner = number // tiles // PAIRS
    of_row, place, seen = row_places(
        tile, owner, rows, length, values_batch, values_head, values_token, HEADS, MAPS, TOKENS
    )
    # Values and gradients of all heads and maps, before those of the next network.
    every = tl.cast(rows, tl.int64) * MAPS

    of_networks = weights + owner * MAP_WEIGHTS
    left = network(
        values + 2 * tl.cast(pair, tl.int64) * values_network, of_networks, 2 * pair, of_row, seen,
        middles, place, every,
        2 * PAIRS, INPUTS, SIZE, HIDDEN, DEPTH, ACTIVATION, FAST, PRECISION, DOT, INPUT_LANES, LANES, TOKENS, BLOCK,
    )  # fmt: skip
    right = network(
        values + (2 * tl.cast(pair, tl.int64) + 1) * values_network, of_networks, 2 * pair + 1, of_row, seen,
        middles, place, every,
        2 * PAIRS, INPUTS, SIZE, HIDDEN, DEPTH, ACTIVATION, FAST, PRECISION, DOT, INPUT_LANES, LANES, TOKENS, BLOCK,
    )  # fmt: skip
    store_pair(left, right, combined, grad, output_grads, pair, every, place, seen, SIZE, FAST, LANES)


@triton.jit
def store_pair(
    left, right, combined, grad, output_grads, pair, every, place, seen,
    SIZE: tl.constexpr,
    FAST: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write the features of a pair of outputs; or, given their gradient, those of the outputs."""
    root: tl.constexpr = SIZE**0.5
    left = as_float32(left)
    right = as_float32(right)
    bounded = tanh(left * right * (1 / root), FAST)
    if grad is None:
        store_rows(combined + pair * every * SIZE, place, bounded * root, seen, SIZE, LANES)
    else:
        of_left = 2 * pair * every * SIZE
        of_right = of_left + every * SIZE
        slope = load_values(grad + pair * every * SIZE, place * SIZE, seen, SIZE, LANES) * (1 - bounded * bounded)
        store_rows(output_grads + of_left, place, slope * right, seen, SIZE, LANES)
        store_rows(output_grads + of_right, place, slope * left, seen, SIZE, LANES)


@triton.jit
def network(
    values,
    weights,
    index,
    of_row,
    seen,
    middles,
    place,
    every,
    NETWORKS: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    INPUT_LANES: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Output (TOKENS, LANES) of the network with this index, rounded, for it may have to wait. Writes its middles."""
    FIRST: tl.constexpr = 2 * INPUTS + HIDDEN * (INPUTS + SIZE)
    LATER: tl.constexpr = 2 * SIZE + 2 * HIDDEN * SIZE
    of_stage = weights + index * (FIRST + (DEPTH - 1) * LATER)
    rows = load_values(values, of_row, seen, INPUTS, INPUT_LANES)
    output = stage(
        rows, of_stage, INPUTS, SIZE, HIDDEN, ACTIVATION, FAST, PRECISION, DOT, INPUT_LANES, LANES, TOKENS, BLOCK
    )
    of_stage += FIRST
    for before in tl.static_range(DEPTH - 1):
        if middles is not None:
            store_rows(middles + (before * NETWORKS + index) * every * SIZE, place, output, seen, SIZE, LANES)
        output = stage(
            output, of_stage, SIZE, SIZE, HIDDEN, ACTIVATION, FAST, PRECISION, DOT, LANES, LANES, TOKENS, BLOCK
        )
        of_stage += LATER
    return output.to(DOT)


@triton.jit
def stage(
    values,
    weights,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    INPUT_LANES: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """values (TOKENS, INPUT_LANES) -> (TOKENS, LANES), both float32."""
    standard, _inverse = standardize(values, INPUTS, INPUT_LANES)
    scale, bias = scale_and_bias(weights, INPUTS, INPUT_LANES)
    normed = as_operand(standard * scale[None, :] + bias[None, :], DOT, PRECISION)
    total = tl.zeros((TOKENS, LANES), tl.float32)
    for start in range(0, HIDDEN, BLOCK):
        up = load_up(weights, start, INPUTS, HIDDEN, INPUT_LANES, BLOCK).to(DOT)
        down = load_down(weights, start, INPUTS, SIZE, HIDDEN, LANES, BLOCK).to(DOT)
        hidden = tl.dot(normed, tl.trans(up), input_precision=PRECISION)
        active, _bounded = twice_active(hidden, ACTIVATION, FAST)
        total = tl.dot(as_operand(active, DOT, PRECISION), tl.trans(down), total, input_precision=PRECISION)
    return 0.5 * total


@triton.jit
def load_values(pointer, of_row, seen, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """(rows, LANES) in float32; zero for rows that are not `seen` and columns past WIDTH."""
    columns = tl.arange(0, LANES)
    mask = seen[:, None] & (columns < WIDTH)[None, :]
    return tl.load(pointer + of_row[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(pointer, place, tile, seen, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Write a tile into a contiguous (., WIDTH)."""
    columns = tl.arange(0, LANES)
    mask = seen[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointer + place[:, None] * WIDTH + columns[None, :], tile.to(pointer.dtype.element_ty), mask)


@triton.jit
def standardize(values, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Values less their mean, by their deviation; and 1 / deviation. Lanes past WIDTH are zero."""
    mean = tl.sum(values, 1) * (1.0 / WIDTH)
    inside = (tl.arange(0, LANES) < WIDTH)[None, :]
    centred = tl.where(inside, values - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) * (1.0 / WIDTH) + EPSILON)
    return centred * inverse[:, None], inverse


@triton.jit
def scale_and_bias(weights, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Of a stage's norm, float32."""
    columns = tl.arange(0, LANES)
    scale = tl.load(weights + columns, mask=columns < WIDTH, other=0.0)
    bias = tl.load(weights + WIDTH + columns, mask=columns < WIDTH, other=0.0)
    return scale.to(tl.float32), bias.to(tl.float32)


@triton.jit
def load_up(weights, start, INPUTS: tl.constexpr, HIDDEN: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK, LANES): rows of a stage's first matrix from hidden unit `start` on."""
    units = start + tl.arange(0, BLOCK)
    columns = tl.arange(0, LANES)
    mask = (units < HIDDEN)[:, None] & (columns < INPUTS)[None, :]
    return tl.load(weights + 2 * INPUTS + units[:, None] * INPUTS + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_down(
    weights,
    start,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(LANES, BLOCK): columns of a stage's second matrix from hidden unit `start` on."""
    units = start + tl.arange(0, BLOCK)
    rows = tl.arange(0, LANES)
    mask = (rows < SIZE)[:, None] & (units < HIDDEN)[None, :]
    of_matrix = weights + (2 + HIDDEN) * INPUTS
    return tl.load(of_matrix + rows[:, None] * HIDDEN + units[None, :], mask=mask, other=0.0)


@triton.jit
def twice_active(x, ACTIVATION: tl.constexpr, FAST: tl.constexpr):
    """Twice the activation, x (1 + t), and t = tanh z: z = x (LINEAR + CUBIC x^2) of GELU, x / 2 of SiLU; or a sign.

    Twice, for the halving is spared where a product follows, at whose end it is done on fewer numbers.
    """
    if ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x + x), tl.where(x > 0, 1.0, -1.0)
    if ACTIVATION == "silu":
        argument = x * SILU
    else:
        argument = x * (LINEAR + CUBIC * (x * x))
    if FAST:  # one instruction, to 2^-11, where activations are rounded to 2^-9 all the same
        bounded = _fast_tanh(argument)
        return x + x * bounded, bounded
    share = 2 / (1 + tl.exp(tl.minimum(-2 * argument, 80.0)))
    return x * share, share - 1


@triton.jit
def _fast_tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """To the dtype's relative precision also near zero, where 1 - 2 / (e^2x + 1) has none."""
    if FAST:
        return _fast_tanh(x)
    size = tl.abs(x)
    small = tl.minimum(size, 0.25)
    square = small * small
    near = small * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decayed = tl.exp(-2 * size)
    result = tl.where(size < 0.25, near, (1 - decayed) / (1 + decayed))
    return tl.where(x < 0, -result, result)
