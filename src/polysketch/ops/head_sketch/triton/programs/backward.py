"""Gradients of norm and sketch of heads: of x, of scale and of bias.

With y made again from x, L1 = y G1, L2 = y G2, g the gradient of their product and u that of y itself:

    dy = u + (g L2) G1^T + (g L1) G2^T
    dx = (ds - mean(ds) - s mean(ds s)) / deviation,  ds = dy scale,  s = (x - mean) / deviation
    dscale = sum over rows of dy s,  dbias = sum over rows of dy
"""

import triton
import triton.language as tl

from polysketch.ops.head_sketch.triton.programs.forward import affine, load_matrix, load_weights, standardised
from polysketch.ops.triton.programs.rows import row_places
from polysketch.ops.triton.programs.shared import load_rows


@triton.jit(do_not_specialize=["length", "rows", "tiles"])
def head_sketch_backward(
    x,
    scale,
    bias,
    matrices,
    grad_normed,
    grad_features,
    grad_x,
    sums,
    x_batch, x_head, x_token,
    length,
    rows,
    grad_batch, grad_head, grad_token,
    tiles,
    EPSILON: tl.constexpr,
    HEADS: tl.constexpr,
    MAPS: tl.constexpr,
    INPUTS: tl.constexpr,
    FEATURES: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the rows of one map.

    grad_normed (batch, HEADS, length, INPUTS) or None and grad_features (batch, HEADS, length, FEATURES), None where
    matrices is, are contiguous; grad_x has strides. sums (MAPS tiles, 2, INPUTS), float32: of the rows of every tile,
    for scale and for bias. The others as of `head_sketch`.
    """
    number = tl.program_id(0)
    tile = number % tiles
    owner = number // tiles
    of_row, place, seen = row_places(tile, owner, rows, length, x_batch, x_head, x_token, HEADS, MAPS, TOKENS)
    lanes = tl.arange(0, LANES)
    standard, steep = standardised(x, of_row, seen, EPSILON, INPUTS, LANES)

    # Rows past the end have no gradient, and add nothing.
    change = tl.zeros((TOKENS, LANES), tl.float32)
    if grad_normed is not None:
        change = load_rows(grad_normed, place, INPUTS, lanes, seen, INPUTS).to(tl.float32)
    if matrices is not None:
        operand = affine(standard, scale, bias, INPUTS, LANES).to(x.dtype.element_ty).to(DOT)
        of_map = matrices + tl.cast(owner, tl.int64) * (2 * INPUTS * FEATURES)
        for start in range(0, FEATURES, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            left = load_matrix(of_map, 0, columns, INPUTS, FEATURES, LANES).to(DOT)
            right = load_matrix(of_map, 1, columns, INPUTS, FEATURES, LANES).to(DOT)
            upstream = load_rows(grad_features, place, FEATURES, columns, seen, FEATURES).to(tl.float32)
            of_left = (upstream * tl.dot(operand, right, input_precision=PRECISION)).to(DOT)
            of_right = (upstream * tl.dot(operand, left, input_precision=PRECISION)).to(DOT)
            change = tl.dot(of_left, tl.trans(left), change, input_precision=PRECISION)
            change = tl.dot(of_right, tl.trans(right), change, input_precision=PRECISION)

    add_up(sums + number.to(tl.int64) * (2 * INPUTS), change * standard, change, INPUTS, LANES)
    found = through_norm(change * load_weights(scale, INPUTS, LANES)[None, :], standard, steep, INPUTS)
    where, _, _ = row_places(tile, owner, rows, length, grad_batch, grad_head, grad_token, HEADS, MAPS, TOKENS)
    mask = seen[:, None] & (lanes < INPUTS)[None, :]
    tl.store(grad_x + where[:, None] + lanes[None, :], found.to(grad_x.dtype.element_ty), mask)


@triton.jit
def through_norm(change, standard, steep, INPUTS: tl.constexpr):
    """The gradient of rows, given that of the rows standardised."""
    mean = tl.sum(change, 1) / INPUTS
    along = tl.sum(change * standard, 1) / INPUTS
    return (change - mean[:, None] - standard * along[:, None]) * steep[:, None]


@triton.jit
def add_up(sums, of_scale, of_bias, INPUTS: tl.constexpr, LANES: tl.constexpr):
    """Write the sums over the rows of a tile."""
    lanes = tl.arange(0, LANES)
    tl.store(sums + lanes, tl.sum(of_scale, 0), mask=lanes < INPUTS)
    tl.store(sums + INPUTS + lanes, tl.sum(of_bias, 0), mask=lanes < INPUTS)
