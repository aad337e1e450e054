"""Gradients of a causal convolution, g being that of the output:

dx_j = sum_t taps_t g_{j + (SIZE - 1) - t},  dtaps_t = sum_j x_j g_{j + (SIZE - 1) - t}

The inputs before the first token are rows of their own, those of the tail.
"""

import triton
import triton.language as tl

from polysketch.ops.convolution.triton.programs.forward import UNROLLED, load_seen, load_tap, place, real_tokens
from polysketch.ops.triton.programs.shared import store_rows


@triton.jit(do_not_specialize=["length", "tiles"])
def causal_convolution_backward(
    gradient,
    x,
    taps,
    key_mask,
    tail,
    grad_x,
    grad_tail,
    sums,
    gradient_batch, gradient_head, gradient_token,
    x_batch, x_head, x_token,
    grad_batch, grad_head, grad_token,
    length,
    tiles,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the inputs of one head, those of the tail first, and BLOCK of its channels.

    gradient, x and grad_x have (batch, head, token) strides; grad_tail is as tail. sums (batch tiles, HEADS, SIZE,
    WIDTH), float32: the gradient of the taps by the inputs of every tile. The others as of `causal_convolution`.
    """
    batch, head, tile, columns = place(tiles, HEADS, WIDTH, BLOCK)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    x += batch * x_batch + head * x_head
    gradient += batch * gradient_batch + head * gradient_head
    grad_x += batch * grad_batch + head * grad_head
    taps += head * (SIZE * WIDTH)
    sums += ((batch * tiles + tile) * HEADS + head) * (SIZE * WIDTH)
    if key_mask is not None:
        key_mask += batch * length
    if tail is not None:
        tokens -= SIZE - 1
        tail += (batch * HEADS + head) * ((SIZE - 1) * WIDTH)
        grad_tail += (batch * HEADS + head) * ((SIZE - 1) * WIDTH)

    rows = load_seen(x, x_token, key_mask, tail, tokens, length, columns, WIDTH, SIZE)
    change = tl.zeros((TOKENS, BLOCK), tl.float32)
    if SIZE <= UNROLLED:
        for tap in tl.static_range(SIZE):
            after = tokens + (SIZE - 1 - tap)
            upstream = load_seen(gradient, gradient_token, None, None, after, length, columns, WIDTH, SIZE)
            change += load_tap(taps, tap, columns, WIDTH)[None, :] * upstream
            add_up(sums, tap, rows * upstream, columns, WIDTH)
    else:
        for tap in range(SIZE):
            after = tokens + (SIZE - 1 - tap)
            upstream = load_seen(gradient, gradient_token, None, None, after, length, columns, WIDTH, SIZE)
            change += load_tap(taps, tap, columns, WIDTH)[None, :] * upstream
            add_up(sums, tap, rows * upstream, columns, WIDTH)

    if key_mask is not None:
        change = tl.where((real_tokens(key_mask, tokens, length) | (tokens < 0))[:, None], change, 0.0)
    inside = ((tokens >= 0) & (tokens < length))[:, None] & (columns < WIDTH)[None, :]
    places = grad_x + tokens.to(tl.int64)[:, None] * grad_token + columns[None, :]
    tl.store(places, change.to(grad_x.dtype.element_ty), inside)
    if tail is not None:
        store_rows(grad_tail, change, tokens + (SIZE - 1), columns, tokens < 0, WIDTH)


@triton.jit
def add_up(sums, tap, products, columns, WIDTH: tl.constexpr):
    """Write the sums over the rows of a tile."""
    tl.store(sums + tap * WIDTH + columns, tl.sum(products, 0), mask=columns < WIDTH)
