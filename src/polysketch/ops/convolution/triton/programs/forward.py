"""Causal convolution: y_i = sum_t taps_t x_{i - (SIZE - 1) + t}, channels side by side."""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.shared import load_rows, store_rows

UNROLLED = tl.constexpr(8)  # taps; of more the compiler takes long, and their rows are in flight together anyway


@triton.jit(do_not_specialize=["length", "tiles"])
def causal_convolution(
    x,
    taps,
    key_mask,
    tail,
    output,
    x_batch, x_head, x_token,
    length,
    tiles,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the tokens of one head, and BLOCK of its channels.

    x has (batch, head, token) strides. taps (HEADS, SIZE, WIDTH) in float32, key_mask (batch, length) or None, tail
    (batch, HEADS, SIZE - 1, WIDTH) or None and output (batch, HEADS, length, WIDTH) are contiguous.
    """
    batch, head, tile, columns = place(tiles, HEADS, WIDTH, BLOCK)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    x += batch * x_batch + head * x_head
    taps += head * (SIZE * WIDTH)
    if key_mask is not None:
        key_mask += batch * length
    if tail is not None:
        tail += (batch * HEADS + head) * ((SIZE - 1) * WIDTH)

    found = tl.zeros((TOKENS, BLOCK), tl.float32)
    if SIZE <= UNROLLED:
        for tap in tl.static_range(SIZE):
            rows = load_seen(x, x_token, key_mask, tail, tokens + (tap - (SIZE - 1)), length, columns, WIDTH, SIZE)
            found += load_tap(taps, tap, columns, WIDTH)[None, :] * rows
    else:
        for tap in range(SIZE):
            rows = load_seen(x, x_token, key_mask, tail, tokens + (tap - (SIZE - 1)), length, columns, WIDTH, SIZE)
            found += load_tap(taps, tap, columns, WIDTH)[None, :] * rows
    output += (batch * HEADS + head) * length * WIDTH
    store_rows(output, found, tokens.to(tl.int64), columns, tokens < length, WIDTH)


@triton.jit
def place(tiles, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Batch, head, tile of tokens and channels of this program: those of the same tokens follow one another."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    number = tl.program_id(0)
    item = number // BLOCKS // tiles
    columns = number % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    return (item // HEADS).to(tl.int64), (item % HEADS).to(tl.int64), number // BLOCKS % tiles, columns


@triton.jit
def load_seen(x, x_token, key_mask, tail, tokens, length, columns, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """(tokens, columns) of the inputs, float32: of the tail before the first; zero where masked and past the ends."""
    seen = real_tokens(key_mask, tokens, length)
    found = load_rows(x, tokens.to(tl.int64), x_token, columns, seen, WIDTH).to(tl.float32)
    if tail is not None:
        row = tokens + (SIZE - 1)
        found += load_rows(tail, row, WIDTH, columns, (row >= 0) & (tokens < 0), WIDTH).to(tl.float32)
    return found


@triton.jit
def real_tokens(key_mask, tokens, length):
    """Whether there is a token, and it is not masked."""
    seen = (tokens >= 0) & (tokens < length)
    if key_mask is not None:
        seen = seen & (tl.load(key_mask + tokens, mask=seen, other=0) != 0)
    return seen


@triton.jit
def load_tap(taps, tap, columns, WIDTH: tl.constexpr):
    """A number for each channel; zero past the width."""
    return tl.load(taps + tap * WIDTH + columns, mask=columns < WIDTH, other=0.0)
