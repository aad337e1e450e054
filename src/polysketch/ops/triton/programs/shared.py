"""What programs share: rows, powers, and expanded features in registers (`ops/linear/packing.py`).

Expanded rows are numbered as in the public layout of a state: at power 2 in pairs (I, J), I <= J, of 16 x 16 products;
with two factors as the products a_i b_j of the halves, i major; at power 1 otherwise simply feature after feature. Sums
are read with their weight, 2 off the diagonal, already in them.
"""

import triton
import triton.language as tl

TILE = tl.constexpr(16)
PAIR = tl.constexpr(256)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)  # of float32


@triton.constexpr_function
def small_precision(dot, precision):
    """Of the few products that make denominators, which cancel where a query is nearly orthogonal to the keys."""
    return "tf32x3" if dot == tl.bfloat16 else precision


@triton.constexpr_function
def expanded_rows(features, power, factors):
    """Expanded rows of so many features."""
    if factors == 2:
        return (features // 2) * (features // 2)
    tiles = (features + 15) // 16
    return tiles * (tiles + 1) // 2 * 256 if power == 2 else features


@triton.constexpr_function
def half_block(features):
    """The power of two, at least 16, that covers one of two halves of so many features."""
    return max(16, 1 << (features // 2 - 1).bit_length())


@triton.jit
def factor_columns(rows, FEATURES: tl.constexpr):
    """The features that the products `rows` of two halves are made of; FEATURES, where nothing is, past the last."""
    HALF: tl.constexpr = FEATURES // 2
    inside = rows < HALF * HALF
    return tl.where(inside, rows // HALF, FEATURES), tl.where(inside, HALF + rows % HALF, FEATURES)


@triton.jit
def tile_pair(pair, TILES: tl.constexpr):
    """(I, J) of the pair with this number."""
    first = 0
    for row in tl.static_range(1, TILES):
        first += tl.where(pair >= row * TILES - row * (row - 1) // 2, 1, 0)
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


@triton.jit
def store_rows(pointer, found, tokens, columns, seen, WIDTH: tl.constexpr):
    """Write (tokens, columns) of a contiguous row-major tensor in its dtype."""
    mask = seen[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointer + tokens[:, None] * WIDTH + columns[None, :], found.to(pointer.dtype.element_ty), mask)


@triton.jit
def power(base, EXPONENT: tl.constexpr):
    """base^EXPONENT by squarings."""
    result = tl.full(base.shape, 1.0, base.dtype)
    for bit in tl.static_range(31):
        if (EXPONENT >> bit) & 1:
            result *= base
        if EXPONENT >> (bit + 1):
            base *= base
    return result


@triton.jit
def reciprocal(mass):
    """1 / mass, and zero for a row without weight, as `polysketch.ops.mass` has it: its output is zero."""
    none = tl.abs(mass) < SMALLEST_NORMAL
    return tl.where(none, 0.0, 1.0 / tl.where(none, 1.0, mass))


@triton.jit
def as_float32(rounded):
    """What was just rounded; from bfloat16 by its bits, for compilers turn that pair of conversions into slow ones."""
    if rounded.dtype == tl.bfloat16:
        return (rounded.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return rounded.to(tl.float32)


@triton.jit
def as_operand(x, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Computed numbers as an operand of a product in the dtype DOT, rounded to nearest.

    Tensor cores cut off the digits for which TF32 has no room. Cut numbers are all too small, so that their errors add
    up in a sum where those of rounded ones cancel: twice the error of a product in float16.
    """
    if PRECISION == "tf32":
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)  # the sum of bits may be no NaN any more
    else:
        return x.to(DOT)


@triton.jit
def load_factor_sums(sums, down, across, columns, HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """(ROWS, columns) of the sums for the products of entries `down` of the first half with `across` of the second."""
    rows = tl.reshape(down[:, None] * HALF + across[None, :], (ROWS,))
    inside = tl.reshape((down < HALF)[:, None] & (across < HALF)[None, :], (ROWS,))
    return load_rows(sums, rows, WIDTH, columns, inside, WIDTH)


@triton.jit
def read_sums(
    x, tokens, stride, seen, sums, normalizer, columns,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, POWER: tl.constexpr, FACTORS: tl.constexpr, PRECISION: tl.constexpr,
    DOT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Numerator E(x) S (TOKENS, COLUMNS) and, with a normalizer, denominator E(x) z (TOKENS), ROWS rows at a time."""
    numerator = tl.zeros((TOKENS, COLUMNS), tl.float32)
    denominator = tl.zeros((TOKENS,), tl.float32)
    if FACTORS == 2:
        HALF: tl.constexpr = FEATURES // 2
        ACROSS: tl.constexpr = half_block(FEATURES)
        DOWN: tl.constexpr = ROWS // ACROSS
        across = tl.arange(0, ACROSS)
        # Read once, side by side, for all products; a half's entry after the other meets them.
        second = load_rows(x + HALF, tokens, stride, across, seen, HALF).to(DOT)
        for start in range(0, HALF, DOWN):
            down = start + tl.arange(0, DOWN)
            first = load_rows(x, tokens, stride, down, seen, HALF).to(DOT)
            products = tl.reshape(first[:, :, None] * second[:, None, :], (TOKENS, ROWS))
            found = load_factor_sums(sums, down, across, columns, HALF, WIDTH, ROWS).to(DOT)
            numerator = tl.dot(products, found, numerator, input_precision=PRECISION)
        if normalizer is not None:
            for tile in range(((HALF + 15) // 16) * ((HALF + 15) // 16)):
                left = tile // ((HALF + 15) // 16) * 16 + tl.arange(0, 16)
                right = tile % ((HALF + 15) // 16) * 16 + tl.arange(0, 16)
                inside = (left < HALF)[:, None] & (right < HALF)[None, :]
                mass = tl.load(normalizer + left[:, None] * HALF + right[None, :], mask=inside, other=0.0)
                of_left = load_rows(x, tokens, stride, left, seen, HALF).to(tl.float32)
                of_right = load_rows(x + HALF, tokens, stride, right, seen, HALF).to(tl.float32)
                half = tl.dot(of_left, mass, input_precision=small_precision(DOT, PRECISION))
                denominator += tl.sum(half * of_right, 1)
    elif POWER == 1:
        for start in range(0, FEATURES, ROWS):
            rows = start + tl.arange(0, ROWS)
            operand = load_rows(x, tokens, stride, rows, seen, FEATURES)
            found = load_rows(sums, rows, WIDTH, columns, rows < FEATURES, WIDTH).to(DOT)
            numerator = tl.dot(operand.to(DOT), found, numerator, input_precision=PRECISION)
            if normalizer is not None:
                mass = tl.load(normalizer + rows, mask=rows < FEATURES, other=0.0)
                denominator += tl.sum(operand.to(tl.float32) * mass[None, :], 1)
    else:
        TILES: tl.constexpr = (FEATURES + 15) // 16
        PAIRS: tl.constexpr = TILES * (TILES + 1) // 2
        SLICE: tl.constexpr = ROWS // 16
        PARTS: tl.constexpr = 256 // ROWS
        across = tl.arange(0, TILE)
        for step in range(PAIRS * PARTS):
            first, second = tile_pair(step // PARTS, TILES)
            left_columns = first * TILE + (step % PARTS) * SLICE + tl.arange(0, SLICE)
            left = load_rows(x, tokens, stride, left_columns, seen, FEATURES).to(DOT)
            right = load_rows(x, tokens, stride, second * TILE + across, seen, FEATURES).to(DOT)
            expanded = tl.reshape(left[:, :, None] * right[:, None, :], (TOKENS, ROWS))
            rows = step * ROWS + tl.arange(0, ROWS)
            found = load_rows(sums, rows, WIDTH, columns, rows >= 0, WIDTH).to(DOT)
            numerator = tl.dot(expanded, found, numerator, input_precision=PRECISION)
        if normalizer is not None:
            for pair in range(PAIRS):
                first, second = tile_pair(pair, TILES)
                left = load_rows(x, tokens, stride, first * TILE + across, seen, FEATURES).to(tl.float32)
                right = load_rows(x, tokens, stride, second * TILE + across, seen, FEATURES).to(tl.float32)
                tile = tl.load(normalizer + pair * PAIR + across[:, None] * TILE + across[None, :])
                half = tl.dot(left, tile, input_precision=small_precision(DOT, PRECISION))
                denominator += tl.sum(half * right, 1)
            # A sum of squares, which rounding may have taken below zero.
            denominator = tl.maximum(denominator, 0.0)
    return numerator, denominator
