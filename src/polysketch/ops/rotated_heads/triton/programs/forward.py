"""Norm and rotation of heads: y = x / sqrt(mean(x^2) + eps) scale, and (y1 cos - y2 sin, y2 cos + y1 sin) of halves.

Memory decides how long this takes: a head of a token is read once, normed and rotated in registers, and written.
"""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.shared import as_float32, load_rows


@triton.jit(do_not_specialize=["angle_rows", "length", "rows"])
def rotated_heads(
    x,
    scale,
    cos,
    sin,
    normed,
    rotated,
    x_batch, x_head, x_token,
    angle_rows,
    length,
    rows,
    EPSILON: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """One program: a tile of tokens, a group of their heads one after the other, for which angles are read once.

    x (batch, HEADS, length, WIDTH) has strides. scale (HEADS, WIDTH), normed and rotated (batch, HEADS, length, WIDTH)
    are contiguous, each None where absent, and so are cos and sin (batches, length, WIDTH / 2): from one batch to the
    next are angle_rows of their rows, none where all have the same positions.
    """
    HALF: tl.constexpr = WIDTH // 2
    tile, start, end = share_of_program(HEADS, GROUP)
    batch, token, seen = token_places(tile, length, rows, TOKENS)
    of_row = batch * x_batch + token * x_token
    if cos is not None:
        cosine, sine = load_angles(cos, sin, batch * angle_rows + token, seen, HALF, LANES)

    for head in range(start, end):
        first, second = load_halves(x + tl.cast(head, tl.int64) * x_head, of_row, seen, HALF, LANES)
        place = ((batch * HEADS + head) * length + token) * WIDTH
        if scale is not None:
            first, second, _ = standardised(first, second, seen, EPSILON, WIDTH)
            left, right = load_factors(scale + head * WIDTH, HALF, LANES)
            rounded_first = (first * left[None, :]).to(x.dtype.element_ty)
            rounded_second = (second * right[None, :]).to(x.dtype.element_ty)
            if normed is not None:
                store_halves(normed, rounded_first, rounded_second, place, seen, HALF, LANES)
            first, second = as_float32(rounded_first), as_float32(rounded_second)
        if cos is not None:
            turned_first = first * cosine - second * sine
            turned_second = second * cosine + first * sine
            store_halves(rotated, turned_first, turned_second, place, seen, HALF, LANES)


@triton.jit
def share_of_program(HEADS: tl.constexpr, GROUP: tl.constexpr):
    """The tile of tokens of this program, its first head and the one after its last.

    Programs of the same tokens follow one another: their heads lie side by side in memory, and their angles are the
    same.
    """
    GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    number = tl.program_id(0)
    start = number % GROUPS * GROUP
    return number // GROUPS, start, tl.minimum(start + GROUP, HEADS)


@triton.jit
def token_places(tile, length, rows, TOKENS: tl.constexpr):
    """Of the tokens of a tile, counted batch by batch: their batch and place in it, int64, and whether they exist."""
    row = tile * TOKENS + tl.arange(0, TOKENS)
    return (row // length).to(tl.int64), (row % length).to(tl.int64), row < rows


@triton.jit
def load_halves(pointer, at, seen, HALF: tl.constexpr, LANES: tl.constexpr):
    """Both halves of the rows that begin `at` these places, float32; zero past the ends."""
    lanes = tl.arange(0, LANES)
    first = load_rows(pointer, at, 1, lanes, seen, HALF)
    second = load_rows(pointer + HALF, at, 1, lanes, seen, HALF)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_halves(pointer, first, second, at, seen, HALF: tl.constexpr, LANES: tl.constexpr):
    """Write both halves of rows in their tensor's dtype."""
    lanes = tl.arange(0, LANES)
    mask = seen[:, None] & (lanes < HALF)[None, :]
    places = pointer + at[:, None] + lanes[None, :]
    tl.store(places, first.to(pointer.dtype.element_ty), mask)
    tl.store(places + HALF, second.to(pointer.dtype.element_ty), mask)


@triton.jit
def load_angles(cos, sin, row, seen, HALF: tl.constexpr, LANES: tl.constexpr):
    """Cosine and sine of the angles of tokens; zero past the ends."""
    lanes = tl.arange(0, LANES)
    return load_rows(cos, row, HALF, lanes, seen, HALF), load_rows(sin, row, HALF, lanes, seen, HALF)


@triton.jit
def load_factors(pointer, HALF: tl.constexpr, LANES: tl.constexpr):
    """The factors of both halves of a head, float32; zero past the ends."""
    lanes = tl.arange(0, LANES)
    first = tl.load(pointer + lanes, mask=lanes < HALF, other=0.0)
    second = tl.load(pointer + HALF + lanes, mask=lanes < HALF, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def standardised(first, second, seen, EPSILON: tl.constexpr, WIDTH: tl.constexpr):
    """Rows by the root of their mean square, and one over that; zero past the ends."""
    square = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / WIDTH
    steep = tl.where(seen, 1.0 / tl.sqrt(square + EPSILON), 0.0)
    return first * steep[:, None], second * steep[:, None], steep
