"""The low-rank sketch, forward: features f = sum_t prod_j x Theta_tj, products entrywise.

The linear maps x Theta_tj are several times as many numbers as come in and go out. Here a map is the float32 sums of
one product of matrices, for a tile of rows and a tile of features. It is multiplied into the tile's product where it
is, in registers, and never written.
"""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.rows import row_places
from polysketch.ops.triton.programs.shared import load_rows, store_rows


@triton.jit(do_not_specialize=["length", "rows", "tiles"])
def low_rank_sketch(
    x,
    factors,
    features,
    x_batch, x_head, x_token,
    length,
    rows,
    tiles,
    HEADS: tl.constexpr,
    MAPS: tl.constexpr,
    INPUTS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANK: tl.constexpr,
    DEGREE: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the rows of one map, BLOCK of its features.

    Rows of a map are those of its HEADS / MAPS heads, counted batch by batch, head by head. x has (batch, head, token)
    strides. factors (MAPS, RANK, DEGREE, INPUTS, FEATURES) and features (batch, HEADS, length, FEATURES) are
    contiguous. Programs of the same rows have neighbouring numbers: x is read from memory once, then from a cache.
    """
    SLICES: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    number = tl.program_id(0)
    columns = (number % SLICES) * BLOCK + tl.arange(0, BLOCK)
    tile = (number // SLICES) % tiles
    owner = number // SLICES // tiles
    of_row, place, seen = row_places(tile, owner, rows, length, x_batch, x_head, x_token, HEADS, MAPS, TOKENS)
    taken = load_rows(x, of_row, 1, tl.arange(0, LANES), seen, INPUTS).to(DOT)
    of_map = factors + tl.cast(owner, tl.int64) * (RANK * DEGREE * INPUTS * FEATURES)

    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for term in range(RANK):
        product = tl.full((TOKENS, BLOCK), 1.0, tl.float32)
        for factor in range(DEGREE):
            theta = load_factor(of_map, term * DEGREE + factor, columns, INPUTS, FEATURES, LANES).to(DOT)
            product *= tl.dot(taken, theta, input_precision=PRECISION)
        total += product
    store_rows(features, total, place, columns, seen, FEATURES)


@triton.jit
def load_factor(of_map, index, columns, INPUTS: tl.constexpr, FEATURES: tl.constexpr, LANES: tl.constexpr):
    """(LANES, columns) of the factor with this number among those of a map; zero past its ends."""
    inputs = tl.arange(0, LANES)
    return load_rows(of_map + index * (INPUTS * FEATURES), inputs, FEATURES, columns, inputs < INPUTS, FEATURES)
