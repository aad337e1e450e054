"""Expanded features in registers: the products of the tile pairs of `ops/linear/tiles.py`, or features as they are.

Expanded rows are numbered as in the public layout of a state: at power 2 in pairs (I, J), I <= J, of 16 x 16 products,
at power 1 simply feature after feature.
"""

import triton
import triton.language as tl

TILE = tl.constexpr(16)
PAIR = tl.constexpr(256)


@triton.jit
def tile_pair(pair, TILES: tl.constexpr):
    """(I, J) of the pair with this number."""
    first = 0
    for row in tl.static_range(1, TILES):
        first += (pair >= row * TILES - row * (row - 1) // 2).to(tl.int32)
    return first, pair - (first * TILES - first * (first - 1) // 2) + first


@triton.jit
def pair_number(first, second, TILES: tl.constexpr):
    """The number of the pair (first, second), first <= second."""
    return first * TILES - first * (first - 1) // 2 + second - first


@triton.jit
def load_rows(pointer, tokens, stride, columns, seen, WIDTH: tl.constexpr):
    """(tokens, columns) of a row-major tensor; zero for tokens that are not `seen` and columns past WIDTH."""
    mask = seen[:, None] & (columns < WIDTH)[None, :]
    return tl.load(pointer + tokens[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_columns(pointer, tokens, stride, columns, seen, WIDTH: tl.constexpr):
    """(columns, tokens): `load_rows` transposed."""
    mask = (columns < WIDTH)[:, None] & seen[None, :]
    return tl.load(pointer + tokens[None, :] * stride + columns[:, None], mask=mask, other=0.0)
