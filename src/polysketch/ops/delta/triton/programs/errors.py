"""What values lack of what the sums before their tokens say, span after span of a head.

    E_c = T_c (V_c - E(K_c) S - sum over chunks b < c of the span of w_cb diag(s_b) E_b)
    S'  = S + E(K)^T diag(s) E

A span is a few chunks; T_c are the inverses of the chunks' systems. A span's answers and the writes of the span before
it need the same sums: a piece of S is read once for both, and written back. The longer a span, the fewer are the steps
that wait for one another; within a span chunks see each other by products of their keys. Pieces are small, so that many
programs share a multiprocessor and wait for one another's memory; S stays in the device's caches.
"""

import triton
import triton.language as tl

from polysketch.ops.linear.triton.programs.outputs import scores
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
def piece_rows(
    key, places, stride, seen, piece,
    FEATURES: tl.constexpr, FACTORS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(SPAN, ROWS) of E(K)."""
    if FACTORS == 1:
        return load_rows(key, places, stride, piece * ROWS + tl.arange(0, ROWS), seen, FEATURES)
    else:
        HALF: tl.constexpr = FEATURES // 2
        of_first, of_second = _of_piece(piece, FEATURES, ROWS)
        first = load_rows(key, places, stride, of_first, seen, HALF)
        second = load_rows(key + HALF, places, stride, of_second, seen, HALF)
        return tl.reshape(first[:, :, None] * second[:, None, :], (SPAN, ROWS))


@triton.jit
def piece_columns(
    key, places, stride, seen, piece,
    FEATURES: tl.constexpr, FACTORS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(ROWS, SPAN) of E(K)^T."""
    if FACTORS == 1:
        return load_columns(key, places, stride, piece * ROWS + tl.arange(0, ROWS), seen, FEATURES)
    else:
        HALF: tl.constexpr = FEATURES // 2
        of_first, of_second = _of_piece(piece, FEATURES, ROWS)
        first = load_columns(key, places, stride, of_first, seen, HALF)
        second = load_columns(key + HALF, places, stride, of_second, seen, HALF)
        return tl.reshape(first[:, None, :] * second[None, :, :], (ROWS, SPAN))


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


@triton.jit
def told_within_span(
    rest, key, strength, errors, places, entry, inside, chunk, left,
    key_token, strength_token, errors_token,
    FEATURES: tl.constexpr, FACTORS: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """`rest` of a chunk less what the earlier chunks of its span have written; pointers are to the span's first token.

    left: tokens from the span's first one on.
    """
    PART: tl.constexpr = FEATURES // FACTORS
    own = key + chunk * CHUNK * key_token
    here = places < left - chunk * CHUNK
    for before in range(chunk):
        other = key + before * CHUNK * key_token
        seen = places < left - before * CHUNK
        weight = scores(
            own, other, places, key_token, places, key_token, here, seen, PART, PRECISION, tl.float32, CHUNK, CHUNK,
            DEPTH,
        )  # fmt: skip
        if FACTORS == 2:
            weight *= scores(
                own + PART, other + PART, places, key_token, places, key_token, here, seen, PART, PRECISION, tl.float32,
                CHUNK, CHUNK, DEPTH,
            )  # fmt: skip
        share = tl.load(strength + (before * CHUNK + places) * strength_token, mask=seen, other=0.0)
        error = tl.load(errors + before * CHUNK * errors_token + entry, mask=seen[:, None] & inside, other=0.0)
        rest -= tl.dot(weight, error * share[:, None], input_precision=PRECISION)
    return rest


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
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of the values of one head, all spans of GROUP chunks in turn.

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
    SPAN: tl.constexpr = GROUP * CHUNK
    places, tokens = tl.arange(0, CHUNK), tl.arange(0, SPAN)
    inside = (columns < WIDTH)[None, :]
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
    entry = places[:, None] * errors_token + columns[None, :]
    entries = tokens[:, None] * errors_token + columns[None, :]
    written = tl.zeros((SPAN, COLUMNS), tl.float32)
    for index in range((chunks + GROUP - 1) // GROUP):
        left = length - index * SPAN
        seen = tokens < left
        told = tokens < index * SPAN  # the whole span before, or nothing
        answer = tl.zeros((SPAN, COLUMNS), tl.float32)
        for piece in range(PIECES):
            held = tl.load(sums + piece * PIECE)
            writing = piece_columns(
                key - SPAN * key_token, tokens, key_token, told, piece, FEATURES, FACTORS, SPAN, ROWS
            )
            held = tl.dot(writing, written, held, input_precision=PRECISION)
            tl.store(sums + piece * PIECE, held)
            asking = piece_rows(key, tokens, key_token, seen, piece, FEATURES, FACTORS, SPAN, ROWS)
            answer = tl.dot(asking, held, answer, input_precision=PRECISION)
        rest = load_rows(value, tokens, value_token, columns, seen, WIDTH) - answer
        if GROUP == 1:
            error = tl.dot(tl.load(inverse), rest, input_precision=PRECISION)
            tl.store(errors + entries, error, seen[:, None] & inside)
        else:
            # What is left of the values stands where errors will: chunks take it from there one by one.
            tl.store(errors + entries, rest, seen[:, None] & inside)
            tl.debug_barrier()
            for chunk in range(tl.minimum(GROUP, chunks - index * GROUP)):
                there = errors + chunk * CHUNK * errors_token + entry
                mask = (places < left - chunk * CHUNK)[:, None] & inside
                own = told_within_span(
                    tl.load(there, mask=mask, other=0.0), key, strength, errors, places, entry, inside, chunk, left,
                    key_token, strength_token, errors_token, FEATURES, FACTORS, PRECISION, CHUNK, DEPTH,
                )  # fmt: skip
                own = tl.dot(tl.load(inverse + chunk * CHUNK * CHUNK), own, input_precision=PRECISION)
                tl.debug_barrier()  # all threads have read what is left before it goes
                tl.store(there, own, mask)
                tl.debug_barrier()
            error = tl.load(errors + entries, mask=seen[:, None] & inside, other=0.0)
        written = error * tl.load(strength + tokens * strength_token, mask=seen, other=0.0)[:, None]
        tl.debug_barrier()  # the next span's pieces may be loaded by other threads than have stored them
        key += SPAN * key_token
        value += SPAN * value_token
        strength += SPAN * strength_token
        errors += SPAN * errors_token
        inverse += GROUP * CHUNK * CHUNK
