"""Sums of expanded features times values over the chunks of a sequence, and their value before each chunk.

    S <- carry_c S + sum over the tokens t of chunk c of factor_t E(x_t) y_t^T        z: u_t in the place of y_t

In order of the chunks for the state of a sequence (x keys, y values, u ones); in reverse for the gradient of the state
(x queries, y gradients of numerators, u gradients of denominators). The sums stay in registers; features are expanded
there and never stored. One chain of chunks keeps no device busy where heads are few. A sequence is then cut into spans
of chunks. They are first folded each by itself (no sums before them, `final_sums` of every span), and then together:
each begins with the sums of the spans before it.
"""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.shared import (
    TILE,
    expanded_rows,
    half_block,
    load_columns,
    load_rows,
    tile_pair,
)


@triton.constexpr_function
def fold_blocks(features, power, factors, rows):
    """Programs that the rows of the sums are cut into; with two factors whole halves lie in each."""
    expanded = expanded_rows(features, power, factors)
    if factors == 2:
        down = rows // half_block(features)
        return (features // 2 + down - 1) // down
    return (expanded + rows - 1) // rows


@triton.jit
def _store_normalizer(pointer, normalizer, weight, slots, POWER: tl.constexpr, EXPANDED: tl.constexpr):
    """A row of what is not at power 2 is added up over its tokens here alone, not at every step."""
    found = normalizer if POWER == 2 else tl.sum(normalizer, 1)
    tl.store(pointer + slots, found * weight, slots < EXPANDED)


@triton.jit
def _begin_span(
    initial_sums, initial_normalizer, span_sums, span_normalizer, span_decay, head, own_span, spans, entry, inside,
    slots, outer,
    EXPANDED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums and normalizers before a span: those of before the sequence, decayed, and what each span before it adds."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    before = tl.zeros(slots.shape, tl.float32)
    if initial_sums is not None:
        total = tl.load(initial_sums + head * EXPANDED * WIDTH + entry, mask=inside, other=0.0) / outer
        before = tl.load(initial_normalizer + head * EXPANDED + slots, mask=slots < EXPANDED, other=0.0) / outer
    if span_sums is not None:
        for number_before in range(own_span):
            place = head * (spans - 1) + number_before
            if span_decay is not None:
                decay = tl.load(span_decay + place)
                total *= decay
                before *= decay
            total += tl.load(span_sums + place * EXPANDED * WIDTH + entry, mask=inside, other=0.0) / outer
            before += tl.load(span_normalizer + place * EXPANDED + slots, mask=slots < EXPANDED, other=0.0) / outer
    return total, before


@triton.jit
def _begin_chunk(
    total, normalizer, weight, carry, states, state_normalizers, place, entry, inside, slots, column_block,
    POWER: tl.constexpr, EXPANDED: tl.constexpr, WIDTH: tl.constexpr, WRITE_STATES: tl.constexpr,
):  # fmt: skip
    """Keep the sums before a chunk, weighted as they are read, and let them decay over it."""
    if WRITE_STATES:
        tl.store(states + place * EXPANDED * WIDTH + entry, (total * weight).to(states.dtype.element_ty), inside)
        if column_block == 0:
            _store_normalizer(state_normalizers + place * EXPANDED, normalizer, weight, slots, POWER, EXPANDED)
    if carry is not None:
        decay = tl.load(carry + place)
        total *= decay
        normalizer *= decay
    return total, normalizer


@triton.jit
def _fold_block(
    total, normalizer, x, y, u, factor, head, batch, key_head, first, step, columns, left, right,
    x_batch, x_head, x_token, y_batch, y_head, y_token, length, chunk,
    KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr, POWER: tl.constexpr,
    FACTORS: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Add TOKENS tokens of one of the heads that share the sums, of the chunk that begins with token `first`."""
    query_head = key_head * SHARED + step % SHARED
    offset = (step // SHARED) * TOKENS
    start = first.to(tl.int64) + offset
    tokens = tl.arange(0, TOKENS)
    seen = (tokens + offset < chunk) & (tokens + start < length)
    of_x = x + batch * x_batch + query_head * x_head + start * x_token
    of_y = y + batch * y_batch + query_head * y_head + start * y_token
    column = load_rows(of_y, tokens, y_token, columns, seen, WIDTH).to(DOT)
    ones = seen.to(tl.float32)
    if factor is not None:
        ones = tl.load(factor + head * length + start + tokens, mask=seen, other=0.0)
        column = (column * ones[:, None]).to(DOT)
    if u is not None:
        query_row = batch * (KEY_HEADS * SHARED) + query_head
        ones *= tl.load(u + query_row * length + start + tokens, mask=seen, other=0.0)
    if POWER == 2:
        of_left = load_columns(of_x, tokens, x_token, left, seen, FEATURES).to(DOT)
        of_right = load_columns(of_x, tokens, x_token, right, seen, FEATURES).to(DOT)
        expanded = tl.reshape(of_left[:, None, :] * of_right[None, :, :], (ROWS, TOKENS))
        weighted = (of_left * ones[None, :]).to(DOT)
        normalizer = tl.dot(weighted, tl.trans(of_right), normalizer, input_precision=PRECISION)
    elif FACTORS == 2:
        HALF: tl.constexpr = FEATURES // 2
        of_left = load_columns(of_x, tokens, x_token, left, seen, HALF).to(tl.float32)
        of_right = load_columns(of_x + HALF, tokens, x_token, right, seen, HALF).to(tl.float32)
        products = tl.reshape(of_left[:, None, :] * of_right[None, :, :], (ROWS, TOKENS))
        expanded = products.to(DOT)
        normalizer += products * ones[None, :]
    else:
        expanded = load_columns(of_x, tokens, x_token, left, seen, FEATURES).to(DOT)
        normalizer += expanded * ones[None, :]
    return tl.dot(expanded, column, total, input_precision=PRECISION), normalizer


@triton.jit(do_not_specialize=["length", "chunk", "chunks", "spans", "span"])
def linear_fold(
    x, y, u, factor, carry,
    initial_sums, initial_normalizer,
    span_sums, span_normalizer, span_decay,
    states, state_normalizers,
    final_sums, final_normalizer,
    x_batch, x_head, x_token,
    y_batch, y_head, y_token,
    length, chunk, chunks, spans, span,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    POWER: tl.constexpr,
    FACTORS: tl.constexpr,
    REVERSE: tl.constexpr,
    GRADIENT: tl.constexpr,
    WRITE_STATES: tl.constexpr,
    WRITE_FINAL: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """One program: a block of expanded rows and of value columns of one key head, for one span of `span` chunks.

    Shapes: x (batch, heads, length, FEATURES), y (batch, heads, length, WIDTH), u (batch, heads, length); heads are
    KEY_HEADS x SHARED. factor (batch, KEY_HEADS, length), carry (batch, KEY_HEADS, chunks). initial and final
    (batch, KEY_HEADS, expanded, WIDTH); states (batch, KEY_HEADS, chunks, expanded, WIDTH), each weighted as it
    is read; normalizers without WIDTH. Spans are numbered as they are gone through. span_sums, what each span but the
    last adds, (batch, KEY_HEADS, spans - 1, expanded, WIDTH), and span_decay, what it leaves of what was before,
    (batch, KEY_HEADS, spans - 1). Without them every span begins anew, and final has an entry for each:
    (batch, KEY_HEADS, spans, ...).
    """
    TILES: tl.constexpr = (FEATURES + 15) // 16
    PARTS: tl.constexpr = 256 // ROWS if POWER == 2 else 1
    SLICE: tl.constexpr = ROWS // 16
    EXPANDED: tl.constexpr = expanded_rows(FEATURES, POWER, FACTORS)
    HALF: tl.constexpr = FEATURES // 2
    ACROSS: tl.constexpr = half_block(FEATURES)
    DOWN: tl.constexpr = ROWS // ACROSS if FACTORS == 2 else 1
    BLOCKS: tl.constexpr = fold_blocks(FEATURES, POWER, FACTORS, ROWS)
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    number = tl.program_id(0)
    column_block = number % COLUMN_BLOCKS
    block = (number // COLUMN_BLOCKS) % BLOCKS
    of_span = number // (COLUMN_BLOCKS * BLOCKS)
    head = (of_span // spans).to(tl.int64)
    own_span = of_span % spans
    batch, key_head = head // KEY_HEADS, head % KEY_HEADS

    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    rows = block * ROWS + tl.arange(0, ROWS)
    if POWER == 2:
        first, second = tile_pair(block // PARTS, TILES)
        left = first * TILE + (block % PARTS) * SLICE + tl.arange(0, SLICE)
        right = second * TILE + tl.arange(0, TILE)
        weight = tl.where(first == second, 1.0, 2.0)
        slots = block * ROWS + tl.arange(0, SLICE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    elif FACTORS == 2:
        left, right, weight = block * DOWN + tl.arange(0, DOWN), tl.arange(0, ACROSS), 1.0
        there = (left < HALF)[:, None] & (right < HALF)[None, :]
        rows = tl.reshape(tl.where(there, left[:, None] * HALF + right[None, :], EXPANDED), (ROWS,))
        slots = rows
    else:
        left, right, weight, slots = rows, rows, 1.0, rows
    # What a gradient is kept as: without the weight with which it comes in and goes out.
    outer = weight if GRADIENT else 1.0
    entry = rows[:, None] * WIDTH + columns[None, :]
    inside = (rows < EXPANDED)[:, None] & (columns < WIDTH)[None, :]
    total, before = _begin_span(
        initial_sums, initial_normalizer, span_sums, span_normalizer, span_decay, head, own_span, spans, entry, inside,
        slots, outer, EXPANDED, WIDTH, ROWS, COLUMNS,
    )  # fmt: skip
    normalizer = before if POWER == 2 else tl.where((tl.arange(0, TOKENS) == 0)[None, :], before[:, None], 0.0)

    steps = SHARED * tl.cdiv(chunk, TOKENS)
    first_turn = own_span * span
    turns = tl.minimum(span, chunks - first_turn)
    if FLAT:
        # One loop over the blocks of all chunks, so that loads run ahead over the boundaries of chunks too.
        # What is folded last is read by nobody but the final sums.
        for item in range(turns * steps if WRITE_FINAL else (turns - 1) * steps + 1):
            turn = first_turn + item // steps
            index = chunks - 1 - turn if REVERSE else turn
            if item % steps == 0:
                total, normalizer = _begin_chunk(
                    total, normalizer, weight, carry, states, state_normalizers, head * chunks + index, entry, inside,
                    slots, column_block, POWER, EXPANDED, WIDTH, WRITE_STATES,
                )  # fmt: skip
            total, normalizer = _fold_block(
                total, normalizer, x, y, u, factor, head, batch, key_head, index * chunk, item % steps, columns, left,
                right, x_batch, x_head, x_token, y_batch, y_head, y_token, length, chunk,
                KEY_HEADS, SHARED, FEATURES, WIDTH, POWER, FACTORS, PRECISION, DOT, ROWS, TOKENS,
            )  # fmt: skip
    else:
        # Triton 3.6 compiles no loop for sm_100 in which a condition touches what products are added to.
        for own_turn in range(turns):
            turn = first_turn + own_turn
            index = chunks - 1 - turn if REVERSE else turn
            total, normalizer = _begin_chunk(
                total, normalizer, weight, carry, states, state_normalizers, head * chunks + index, entry, inside,
                slots, column_block, POWER, EXPANDED, WIDTH, WRITE_STATES,
            )  # fmt: skip
            for step in range(steps if WRITE_FINAL else tl.where(own_turn < turns - 1, steps, 0)):
                total, normalizer = _fold_block(
                    total, normalizer, x, y, u, factor, head, batch, key_head, index * chunk, step, columns, left,
                    right, x_batch, x_head, x_token, y_batch, y_head, y_token, length, chunk,
                    KEY_HEADS, SHARED, FEATURES, WIDTH, POWER, FACTORS, PRECISION, DOT, ROWS, TOKENS,
                )  # fmt: skip

    if WRITE_FINAL and (span_sums is None or own_span == spans - 1):
        place = of_span.to(tl.int64) if span_sums is None else head
        tl.store(final_sums + place * EXPANDED * WIDTH + entry, total * outer, inside)
        if column_block == 0:
            _store_normalizer(final_normalizer + place * EXPANDED, normalizer, outer, slots, POWER, EXPANDED)
