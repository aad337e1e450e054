"""What values lack of what the sums before their tokens say, chunk after chunk of a head.

    E = T (V - E(K) S)        S' = S + E(K)^T diag(s) E

A chunk's answers and the writes of the chunk before it need the same sums: a piece of S is read once for both, and
written back. Pieces are small, so that many programs share a multiprocessor and wait for one another's memory; S stays
in the device's caches.
"""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.shared import expanded_rows, load_columns, load_rows

TILE = tl.constexpr(8)


@triton.constexpr_function
def sums_pieces(features, factors, rows):
    """Pieces of so many rows that cover the sums: with two factors of rows / 8 features of the first half times 8."""
    if factors == 1:
        return (features + rows - 1) // rows
    half, side = features // 2, rows // 8
    return ((half + side - 1) // side) * ((half + 7) // 8)


@triton.jit
def _of_piece(piece, FEATURES: tl.constexpr, ROWS: tl.constexpr):
    """The features of both halves, each counted from its half's first, whose products are a piece's rows."""
    ACROSS: tl.constexpr = (FEATURES // 2 + TILE - 1) // TILE
    SIDE: tl.constexpr = ROWS // TILE
    down = piece // ACROSS
    return down * SIDE + tl.arange(0, SIDE), (piece - down * ACROSS) * TILE + tl.arange(0, TILE)


@triton.jit
def load_piece(
    key, places, stride, seen, piece,
    FEATURES: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What a piece of E(K) is made of: features of both halves, or, twice, of the piece's rows; (tokens, features)."""
    if FACTORS == 1:
        first = load_rows(key, places, stride, piece * ROWS + tl.arange(0, ROWS), seen, FEATURES)
        return first, first
    else:
        HALF: tl.constexpr = FEATURES // 2
        of_first, of_second = _of_piece(piece, FEATURES, ROWS)
        first = load_rows(key, places, stride, of_first, seen, HALF)
        return first, load_rows(key + HALF, places, stride, of_second, seen, HALF)


@triton.jit
def piece_rows(first, second, FACTORS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """(CHUNK, ROWS) of E(K)."""
    return first if FACTORS == 1 else tl.reshape(first[:, :, None] * second[:, None, :], (CHUNK, ROWS))


@triton.jit
def piece_columns(first, second, FACTORS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """(ROWS, CHUNK) of E(K)^T, from features with tokens last."""
    return first if FACTORS == 1 else tl.reshape(first[:, None, :] * second[None, :, :], (ROWS, CHUNK))


@triton.jit
def load_piece_columns(
    key, places, stride, seen, piece,
    FEATURES: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`load_piece` transposed, (features, tokens)."""
    if FACTORS == 1:
        first = load_columns(key, places, stride, piece * ROWS + tl.arange(0, ROWS), seen, FEATURES)
        return first, first
    else:
        HALF: tl.constexpr = FEATURES // 2
        of_first, of_second = _of_piece(piece, FEATURES, ROWS)
        first = load_columns(key, places, stride, of_first, seen, HALF)
        return first, load_columns(key + HALF, places, stride, of_second, seen, HALF)


@triton.jit
def initial_piece(
    initial, piece, columns,
    FEATURES: tl.constexpr, FACTORS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(ROWS, columns) of the sums of a state, zero past their ends."""
    if FACTORS == 1:
        rows = piece * ROWS + tl.arange(0, ROWS)
    else:
        HALF: tl.constexpr = FEATURES // 2
        first, second = _of_piece(piece, FEATURES, ROWS)
        inside = (first < HALF)[:, None] & (second < HALF)[None, :]
        rows = tl.where(inside, first[:, None] * HALF + second[None, :], HALF * HALF)
        rows = tl.reshape(rows, (ROWS,))
    return load_rows(initial, rows, WIDTH, columns, rows < expanded_rows(FEATURES, 1, FACTORS), WIDTH)


@triton.jit(do_not_specialize=["length", "chunks"])
def delta_errors(
    key, value, strength, inverse, initial, sums, errors,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    strength_batch, strength_head, strength_token,
    errors_batch, errors_head, errors_token,
    length, chunks,
    HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    FACTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of the values of one head, all chunks in turn.

    Shapes: key (batch, HEADS, length, FEATURES), value and errors (batch, HEADS, length, WIDTH), strength (batch,
    HEADS, length), with strides, which are negative where tokens are taken in reverse. Contiguous: inverse as
    `delta_inverse` writes it, initial (batch, HEADS, expanded, WIDTH) or None, and sums, a workspace, (batch, HEADS,
    blocks of columns, pieces, ROWS, COLUMNS).
    """
    BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    PIECES: tl.constexpr = sums_pieces(FEATURES, FACTORS, ROWS)
    EXPANDED: tl.constexpr = expanded_rows(FEATURES, 1, FACTORS)
    PIECE: tl.constexpr = ROWS * COLUMNS
    number = tl.program_id(0)
    row = (number // BLOCKS).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    lanes = tl.arange(0, COLUMNS)
    columns = (number % BLOCKS) * COLUMNS + lanes
    places = tl.arange(0, CHUNK)
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    strength += batch * strength_batch + head * strength_head
    errors += batch * errors_batch + head * errors_head
    inverse += row * chunks * CHUNK * CHUNK + places[:, None] * CHUNK + places[None, :]
    sums += number.to(tl.int64) * PIECES * PIECE + tl.arange(0, ROWS)[:, None] * COLUMNS + lanes[None, :]
    for piece in range(PIECES):
        held = tl.zeros((ROWS, COLUMNS), tl.float32)
        if initial is not None:
            held = initial_piece(initial + row * EXPANDED * WIDTH, piece, columns, FEATURES, FACTORS, WIDTH, ROWS)
        tl.store(sums + piece * PIECE, held)
    tl.debug_barrier()
    written = tl.zeros((CHUNK, COLUMNS), tl.float32)
    for index in range(chunks):
        seen = places < length - index * CHUNK
        told = places < index * CHUNK  # the whole chunk before, or nothing
        answer = tl.zeros((CHUNK, COLUMNS), tl.float32)
        # What the next piece needs is asked for before this one's products: nothing waits for memory.
        coming = tl.load(sums)
        writes = load_piece_columns(key - CHUNK * key_token, places, key_token, told, 0, FEATURES, FACTORS, ROWS)
        asks = load_piece(key, places, key_token, seen, 0, FEATURES, FACTORS, ROWS)
        for piece in range(PIECES):
            held = coming
            writing = piece_columns(writes[0], writes[1], FACTORS, CHUNK, ROWS)
            asking = piece_rows(asks[0], asks[1], FACTORS, CHUNK, ROWS)
            after = tl.minimum(piece + 1, PIECES - 1)
            coming = tl.load(sums + after * PIECE)
            writes = load_piece_columns(
                key - CHUNK * key_token, places, key_token, told, after, FEATURES, FACTORS, ROWS
            )
            asks = load_piece(key, places, key_token, seen, after, FEATURES, FACTORS, ROWS)
            held = tl.dot(writing, written, held, input_precision=PRECISION)
            tl.store(sums + piece * PIECE, held)
            answer = tl.dot(asking, held, answer, input_precision=PRECISION)
        rest = load_rows(value, places, value_token, columns, seen, WIDTH) - answer
        error = tl.dot(tl.load(inverse), rest, input_precision=PRECISION)
        entry = places[:, None] * errors_token + columns[None, :]
        tl.store(errors + entry, error, seen[:, None] & (columns < WIDTH)[None, :])
        written = error * tl.load(strength + places * strength_token, mask=seen, other=0.0)[:, None]
        tl.debug_barrier()  # the next chunk's pieces may be loaded by other threads than have stored them
        key += CHUNK * key_token
        value += CHUNK * value_token
        strength += CHUNK * strength_token
        errors += CHUNK * errors_token
        inverse += CHUNK * CHUNK
