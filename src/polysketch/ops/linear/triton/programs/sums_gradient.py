"""Gradients of linear attention that pass through the sums.

dN and dD are the gradients of a query's numerator and denominator. No two programs write to the same place: results do
not depend on their order.
"""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.shared import (
    PAIR,
    TILE,
    expanded_rows,
    half_block,
    load_rows,
    pair_number,
    read_sums,
    reciprocal,
    small_precision,
    store_rows,
)


@triton.jit(do_not_specialize=["rows"])
def linear_upstream(
    output, output_gradient, denominators, denominator_gradient, numerator_gradient, mass_gradient, rows,
    WIDTH: tl.constexpr, NORMALIZE: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dN (rows, WIDTH) and dD (rows) from the gradients of the output and of the denominator; all contiguous."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, COLUMNS)
    seen = tokens < rows
    gradient = load_rows(output_gradient, tokens, WIDTH, columns, seen, WIDTH).to(tl.float32)
    mass = tl.load(denominator_gradient + tokens, mask=seen, other=0.0)
    if NORMALIZE:
        denominator = tl.load(denominators + tokens, mask=seen, other=0.0)
        gradient *= reciprocal(denominator)[:, None]
        # As rounded as the products will take it, or what values have in common would not cancel.
        gradient = gradient.to(numerator_gradient.dtype.element_ty).to(tl.float32)
        mass -= tl.sum(gradient * load_rows(output, tokens, WIDTH, columns, seen, WIDTH).to(tl.float32), 1)
    store_rows(numerator_gradient, gradient, tokens, columns, seen, WIDTH)
    tl.store(mass_gradient + tokens, mass, seen)


@triton.jit
def contract_tile(
    x, upstream, mass, tokens, stride, seen, sums, normalizer, columns, tile,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of E(x) . (S upstream + z mass) with respect to tile `tile` of x, (TOKENS, 16), at power 2.

    The sum over a of x_a (S_ab upstream + z_ab mass), for every entry b of the tile; twice where a and b share a tile,
    whose products stand there in both orders. The sums come weighted, so that other tiles are counted twice already.
    """
    TILES: tl.constexpr = (FEATURES + 15) // 16
    SLICE: tl.constexpr = ROWS // 16
    PARTS: tl.constexpr = 256 // ROWS
    across = tl.arange(0, TILE)
    found = tl.zeros((TOKENS, TILE), tl.float32)
    for step in range(TILES * PARTS):
        other, part = step // PARTS, step % PARTS
        pair = pair_number(tl.minimum(other, tile), tl.maximum(other, tile), TILES)
        along = part * SLICE + tl.arange(0, SLICE)
        # Rows of the pair for (a, b), b innermost; pairs are kept with the smaller tile first.
        straight = along[:, None] * TILE + across[None, :]
        mirrored = across[None, :] * TILE + along[:, None]
        rows = tl.reshape(tl.where(other <= tile, straight, mirrored), (ROWS,)) + pair * PAIR
        entry = tl.load(sums + rows[None, :] * WIDTH + columns[:, None], mask=(columns < WIDTH)[:, None], other=0.0)
        change = tl.dot(upstream, entry.to(DOT), input_precision=PRECISION)
        factor = load_rows(x, tokens, stride, along + other * TILE, seen, FEATURES).to(tl.float32)
        twice = tl.where(other == tile, 2.0, 1.0)
        found += twice * tl.sum(tl.reshape(change, (TOKENS, SLICE, TILE)) * factor[:, :, None], 1)
    for other in range(TILES):
        pair = pair_number(tl.minimum(other, tile), tl.maximum(other, tile), TILES)
        straight = across[:, None] * TILE + across[None, :]
        mirrored = across[None, :] * TILE + across[:, None]
        entry = tl.load(normalizer + tl.where(other <= tile, straight, mirrored) + pair * PAIR)
        factor = load_rows(x, tokens, stride, across + other * TILE, seen, FEATURES).to(tl.float32)
        twice = tl.where(other == tile, 2.0, 1.0)
        found += twice * mass[:, None] * tl.dot(factor, entry, input_precision=small_precision(DOT, PRECISION))
    return found


@triton.jit
def contract_halves(
    x, upstream, mass, tokens, stride, seen, sums, normalizer, columns, gradient, decay,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of E(x) . (S upstream + z mass) with respect to x, with two factors, times decay.

    With c_ab = S_ab upstream + z_ab mass: the sum over b of x_b c_ab for entry a of the first half, and over a of x_a
    c_ab for b of the second. Each c_ab is made once for both.
    """
    HALF: tl.constexpr = FEATURES // 2
    ACROSS: tl.constexpr = half_block(FEATURES)
    DOWN: tl.constexpr = ROWS // ACROSS
    across = tl.arange(0, ACROSS)
    second = load_rows(x + HALF, tokens, stride, across, seen, HALF).to(tl.float32)
    of_second = tl.zeros((TOKENS, ACROSS), tl.float32)
    for start in range(0, HALF, DOWN):
        down = start + tl.arange(0, DOWN)
        rows = tl.reshape(down[:, None] * HALF + across[None, :], (ROWS,))
        inside = tl.reshape((down < HALF)[:, None] & (across < HALF)[None, :], (ROWS,))
        mask = inside[None, :] & (columns < WIDTH)[:, None]
        entry = tl.load(sums + rows[None, :] * WIDTH + columns[:, None], mask=mask, other=0.0)
        change = tl.dot(upstream, entry.to(DOT), input_precision=PRECISION)
        change += mass[:, None] * tl.load(normalizer + rows, mask=inside, other=0.0)[None, :]
        change = tl.reshape(change, (TOKENS, DOWN, ACROSS))
        first = load_rows(x, tokens, stride, down, seen, HALF).to(tl.float32)
        of_second += tl.sum(change * first[:, :, None], 1)
        of_first = tl.sum(change * second[:, None, :], 2) * decay[:, None]
        there = seen[:, None] & (down < HALF)[None, :]
        tl.store(gradient + tokens[:, None] * FEATURES + down[None, :], of_first.to(gradient.dtype.element_ty), there)
    there = seen[:, None] & (across < HALF)[None, :]
    place = gradient + HALF + tokens[:, None] * FEATURES + across[None, :]
    tl.store(place, (of_second * decay[:, None]).to(gradient.dtype.element_ty), there)


@triton.jit(do_not_specialize=["length", "chunk", "chunks"])
def linear_sums_gradient(
    x, upstream, mass, factor,
    states, state_normalizers,
    x_gradient, read,
    x_batch, x_head, x_token,
    upstream_batch, upstream_head, upstream_token,
    length, chunk, chunks,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    POWER: tl.constexpr,
    FACTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of factor_t E(x_t) . (S_c upstream_t + z_c mass_t) in x_t; `read` is factor_t E(x_t) S_c.

    For queries: S the sums before their chunk, upstream dN, mass dD; there is no `read`. For keys: S the gradient of
    the sums after their chunk, upstream the values, mass None, which is one; `read` is then the gradient of the values.
    Shapes: x (batch, HEADS, length, FEATURES), upstream (batch, HEADS, length, WIDTH), mass (batch, HEADS, length),
    factor (batch, HEADS / SHARED, length), states for HEADS / SHARED heads. COLUMNS cover WIDTH. One program: TOKENS
    tokens of one chunk.
    """
    TILES: tl.constexpr = (FEATURES + 15) // 16
    EXPANDED: tl.constexpr = expanded_rows(FEATURES, POWER, FACTORS)
    number = tl.program_id(0)
    blocks = tl.cdiv(chunk, TOKENS)
    block = number % blocks
    index = (number // blocks) % chunks
    row = (number // blocks // chunks).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    key_row = batch * (HEADS // SHARED) + head // SHARED
    start = (index * chunk).to(tl.int64) + block * TOKENS
    tokens = tl.arange(0, TOKENS)
    seen = (block * TOKENS + tokens < chunk) & (start + tokens < length)
    columns = tl.arange(0, COLUMNS)
    of_x = x + batch * x_batch + head * x_head + start * x_token
    of_upstream = upstream + batch * upstream_batch + head * upstream_head + start * upstream_token
    sums = states + (key_row * chunks + index) * EXPANDED * WIDTH
    normalizer = state_normalizers + (key_row * chunks + index) * EXPANDED
    here = row * length + start

    decay = seen.to(tl.float32)
    if factor is not None:
        decay = tl.load(factor + key_row * length + start + tokens, mask=seen, other=0.0)
    if read is not None:
        of_values, _ = read_sums(
            of_x, tokens, x_token, seen, sums, None, columns,
            FEATURES, WIDTH, POWER, FACTORS, PRECISION, DOT, TOKENS, COLUMNS, ROWS,
        )  # fmt: skip
        store_rows(read + here * WIDTH, of_values * decay[:, None], tokens, columns, seen, WIDTH)
    operand = load_rows(of_upstream, tokens, upstream_token, columns, seen, WIDTH).to(DOT)
    ones = tl.full((TOKENS,), 1.0, tl.float32)
    if mass is not None:
        ones = tl.load(mass + here + tokens, mask=seen, other=0.0)
    if FACTORS == 2:
        contract_halves(
            of_x, operand, ones, tokens, x_token, seen, sums, normalizer, columns, x_gradient + here * FEATURES, decay,
            FEATURES, WIDTH, PRECISION, DOT, TOKENS, ROWS,
        )  # fmt: skip
    else:
        across = tl.arange(0, TILE if POWER == 2 else ROWS)
        for tile in range(TILES if POWER == 2 else (FEATURES + ROWS - 1) // ROWS):
            entries = tile * across.shape[0] + across
            if POWER == 2:
                found = contract_tile(
                    of_x, operand, ones, tokens, x_token, seen, sums, normalizer, columns, tile,
                    FEATURES, WIDTH, PRECISION, DOT, TOKENS, ROWS,
                )  # fmt: skip
            else:
                inside = (entries < FEATURES)[None, :] & (columns < WIDTH)[:, None]
                of_sums = tl.load(sums + entries[None, :] * WIDTH + columns[:, None], mask=inside, other=0.0)
                found = tl.dot(operand, of_sums.to(DOT), input_precision=PRECISION)
                found += ones[:, None] * tl.load(normalizer + entries, mask=entries < FEATURES, other=0.0)[None, :]
            store_rows(x_gradient + here * FEATURES, found * decay[:, None], tokens, entries, seen, FEATURES)
