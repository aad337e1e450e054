"""Gradients of norm and rotation of heads: of x and of scale.

With s = x / deviation made again from x, deviation = sqrt(mean(x^2) + eps), u the gradient of y = s scale and v that of
y rotated:

    dy = u + (v1 cos + v2 sin, v2 cos - v1 sin)
    dx = (ds - s mean(ds s)) / deviation,  ds = dy scale
    dscale = sum over tokens of dy s

Without a norm dx is dy, and x is not read.
"""

import triton
import triton.language as tl

from polysketch.ops.rotated_heads.triton.programs.forward import (
    load_angles,
    load_factors,
    load_halves,
    share_of_program,
    standardised,
    store_halves,
    token_places,
)


@triton.jit(do_not_specialize=["angle_rows", "length", "rows"])
def rotated_heads_backward(
    x,
    scale,
    cos,
    sin,
    grad_normed,
    grad_rotated,
    grad_x,
    sums,
    x_batch, x_head, x_token,
    grad_batch, grad_head, grad_token,
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
    """One program: a tile of tokens, a group of their heads one after the other.

    grad_normed and grad_rotated (batch, HEADS, length, WIDTH), each None where it is zero, are contiguous; grad_x has
    strides. sums (tiles, HEADS, WIDTH), float32: of the tokens of every tile, for scale. x, scale and sums are None
    without a norm, cos and sin where grad_rotated is. The others as of `rotated_heads`.
    """
    HALF: tl.constexpr = WIDTH // 2
    tile, start, end = share_of_program(HEADS, GROUP)
    batch, token, seen = token_places(tile, length, rows, TOKENS)
    if cos is not None:
        cosine, sine = load_angles(cos, sin, batch * angle_rows + token, seen, HALF, LANES)

    for head in range(start, end):
        # Tokens past the end have no gradient, and add nothing.
        place = ((batch * HEADS + head) * length + token) * WIDTH
        first = tl.zeros((TOKENS, LANES), tl.float32)
        second = tl.zeros((TOKENS, LANES), tl.float32)
        if grad_normed is not None:
            first, second = load_halves(grad_normed, place, seen, HALF, LANES)
        if grad_rotated is not None:
            turned_first, turned_second = load_halves(grad_rotated, place, seen, HALF, LANES)
            first += turned_first * cosine + turned_second * sine
            second += turned_second * cosine - turned_first * sine
        if scale is not None:
            of_head = x + tl.cast(head, tl.int64) * x_head
            x_first, x_second = load_halves(of_head, batch * x_batch + token * x_token, seen, HALF, LANES)
            standard_first, standard_second, steep = standardised(x_first, x_second, seen, EPSILON, WIDTH)
            own = sums + (tl.cast(tile, tl.int64) * HEADS + head) * WIDTH
            add_up(own, first * standard_first, second * standard_second, HALF, LANES)
            left, right = load_factors(scale + head * WIDTH, HALF, LANES)
            first *= left[None, :]
            second *= right[None, :]
            along = mean_product(first, second, standard_first, standard_second, WIDTH)
            first = (first - standard_first * along[:, None]) * steep[:, None]
            second = (second - standard_second * along[:, None]) * steep[:, None]
        where = batch * grad_batch + token * grad_token + tl.cast(head, tl.int64) * grad_head
        store_halves(grad_x, first, second, where, seen, HALF, LANES)


@triton.jit
def mean_product(first, second, standard_first, standard_second, WIDTH: tl.constexpr):
    """How far a gradient points along its row: what a norm takes out of it."""
    return (tl.sum(first * standard_first, 1) + tl.sum(second * standard_second, 1)) / WIDTH


@triton.jit
def add_up(sums, of_first, of_second, HALF: tl.constexpr, LANES: tl.constexpr):
    """Write the sums over the tokens of a tile."""
    lanes = tl.arange(0, LANES)
    tl.store(sums + lanes, tl.sum(of_first, 0), mask=lanes < HALF)
    tl.store(sums + HALF + lanes, tl.sum(of_second, 0), mask=lanes < HALF)
