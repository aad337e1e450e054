"""Rows of the heads that share a map, in tiles: counted batch by batch, head by head, token by token."""

import triton
import triton.language as tl


@triton.jit
def row_places(
    tile, owner, rows, length,
    batch_stride, head_stride, token_stride,
    HEADS: tl.constexpr,
    MAPS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Of the rows of a tile: where they are by these strides, in (batch, HEADS, length), and whether they exist."""
    GROUP: tl.constexpr = HEADS // MAPS
    start = tile * TOKENS
    row = start + tl.arange(0, TOKENS)
    item = row // length
    batch = (item // GROUP).to(tl.int64)
    head = (owner * GROUP + item % GROUP).to(tl.int64)
    token = row % length
    # Of a single map the rows are all rows; their numbers take fewer registers than products.
    place = start.to(tl.int64) + tl.arange(0, TOKENS)
    if MAPS > 1:
        place = (batch * HEADS + head) * length + token
    return batch * batch_stride + head * head_stride + token.to(tl.int64) * token_stride, place, row < rows
