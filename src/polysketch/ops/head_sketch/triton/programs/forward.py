"""Norm and sketch of heads: y = (x - mean) / sqrt(variance + eps) scale + bias, features (y G1) * (y G2).

Memory decides how long this takes: a row is read once, normed in registers, written, and multiplied from there.
"""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.rows import row_places
from polysketch.ops.triton.programs.shared import load_rows, store_rows


@triton.jit(do_not_specialize=["length", "rows", "tiles"])
def head_sketch(
    x,
    scale,
    bias,
    matrices,
    normed,
    features,
    x_batch, x_head, x_token,
    length,
    rows,
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

    Rows of a map are those of its HEADS / MAPS heads, counted batch by batch, head by head. x has (batch, head, token)
    strides. scale and bias (INPUTS), matrices (MAPS, 2, INPUTS, FEATURES) or None, normed (batch, HEADS, length,
    INPUTS) and features (batch, HEADS, length, FEATURES) are contiguous.
    """
    number = tl.program_id(0)
    tile = number % tiles
    owner = number // tiles
    of_row, place, seen = row_places(tile, owner, rows, length, x_batch, x_head, x_token, HEADS, MAPS, TOKENS)
    lanes = tl.arange(0, LANES)
    standard, _ = standardised(x, of_row, seen, EPSILON, INPUTS, LANES)
    found = affine(standard, scale, bias, INPUTS, LANES).to(normed.dtype.element_ty)
    store_rows(normed, found, place, lanes, seen, INPUTS)

    if matrices is not None:
        operand = found.to(DOT)
        of_map = matrices + tl.cast(owner, tl.int64) * (2 * INPUTS * FEATURES)
        for start in range(0, FEATURES, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            left = load_matrix(of_map, 0, columns, INPUTS, FEATURES, LANES).to(DOT)
            right = load_matrix(of_map, 1, columns, INPUTS, FEATURES, LANES).to(DOT)
            product = tl.dot(operand, left, input_precision=PRECISION)
            product *= tl.dot(operand, right, input_precision=PRECISION)
            store_rows(features, product, place, columns, seen, FEATURES)


@triton.jit
def standardised(x, of_row, seen, EPSILON: tl.constexpr, INPUTS: tl.constexpr, LANES: tl.constexpr):
    """Rows less their mean, by their deviation, and one over that; float32, zero past the ends."""
    lanes = tl.arange(0, LANES)
    taken = load_rows(x, of_row, 1, lanes, seen, INPUTS).to(tl.float32)
    centred = taken - (tl.sum(taken, 1) / INPUTS)[:, None]
    if LANES > INPUTS:
        centred = tl.where((lanes < INPUTS)[None, :], centred, 0.0)
    variance = tl.sum(centred * centred, 1) / INPUTS
    steep = tl.where(seen, 1.0 / tl.sqrt(variance + EPSILON), 0.0)
    return centred * steep[:, None], steep


@triton.jit
def affine(standard, scale, bias, INPUTS: tl.constexpr, LANES: tl.constexpr):
    """The norm's output, float32; zero past the width."""
    return standard * load_weights(scale, INPUTS, LANES)[None, :] + load_weights(bias, INPUTS, LANES)[None, :]


@triton.jit
def load_weights(pointer, INPUTS: tl.constexpr, LANES: tl.constexpr):
    """A number for each lane, float32; zero past the width."""
    lanes = tl.arange(0, LANES)
    return tl.load(pointer + lanes, mask=lanes < INPUTS, other=0.0).to(tl.float32)


@triton.jit
def load_matrix(of_map, index, columns, INPUTS: tl.constexpr, FEATURES: tl.constexpr, LANES: tl.constexpr):
    """(LANES, columns) of the matrix with this number of a map's two; zero past its ends."""
    inputs = tl.arange(0, LANES)
    return load_rows(of_map + index * (INPUTS * FEATURES), inputs, FEATURES, columns, inputs < INPUTS, FEATURES)
