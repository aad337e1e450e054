"""One new token of every row against a state, which moves on in place; each sum is read once.

    o = (w_s S + sum over the open chunk of (q . k_t)^degree v_t) / (offset + the same for v = 1)        w_s = E(q) d

A first launch deals the expanded rows of every key head, and the tokens of its open chunk, to many programs, so that a
single sequence fills a device; each leaves a part of numerator and denominator. A second, small one adds them up. What
happens to a row (in which slot its token goes, whether its chunk is full) is decided here, from a position in the
device's memory: the same two launches serve every token.
"""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.shared import PAIR, TILE, expanded_rows, factor_columns, reciprocal, tile_pair


@triton.jit(
    do_not_specialize=[
        "query_batch",
        "query_head",
        "key_batch",
        "key_head_stride",
        "value_batch",
        "value_head",
        "local_query_batch",
        "local_query_head",
        "local_key_batch",
        "local_key_head",
        "decay_batch",
        "decay_head",
    ]
)
def linear_extend(
    query,
    key,
    value,
    local_query,
    local_key,
    log_decay,
    sums,
    normalizer,
    open_features,
    open_value,
    open_key,
    open_log_decay,
    position,
    rows,
    numerators,
    denominators,
    positions,
    sums_row, normalizer_row, features_row, values_row, keys_row, decays_row,
    query_batch, query_head,
    key_batch, key_head_stride,
    value_batch, value_head,
    local_query_batch, local_query_head,
    local_key_batch, local_key_head,
    decay_batch, decay_head,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    LOCAL_WIDTH: tl.constexpr,
    POWER: tl.constexpr,
    FACTORS: tl.constexpr,
    DEGREE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOCAL_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    FOLDED: tl.constexpr,
):  # fmt: skip
    """One program: ROWS expanded rows of one key head, or TOKENS slots of its open chunk.

    Shapes: the new token's query (batch, heads, FEATURES), key (batch, KEY_HEADS, FEATURES), value (.., WIDTH),
    local_query and local_key (.., LOCAL_WIDTH), log_decay (batch, KEY_HEADS); heads are KEY_HEADS x SHARED. The state's
    tensors as in `LinearAttentionState`, each row in one piece, with their strides of rows; `rows` (batch,) says which
    row each of the batch has, its own where it is None. position (batch,). numerators (batch, KEY_HEADS, parts, SHARED,
    WIDTH), denominators without WIDTH, positions (batch, KEY_HEADS): what `position` was, for the launch that moves it.
    """
    EXPANDED: tl.constexpr = expanded_rows(FEATURES, POWER, FACTORS)
    PRODUCTS: tl.constexpr = POWER * FACTORS == 2
    BLOCKS: tl.constexpr = (EXPANDED + ROWS - 1) // ROWS
    PARTS: tl.constexpr = BLOCKS + (CHUNK + TOKENS - 1) // TOKENS
    number = tl.program_id(0)
    part = number % PARTS
    head = (number // PARTS).to(tl.int64)
    batch, key_head = head // KEY_HEADS, head % KEY_HEADS
    row = batch if rows is None else tl.load(rows + batch)
    open_features += row * features_row + key_head * (CHUNK * FEATURES)
    open_value += row * values_row + key_head * (CHUNK * WIDTH)
    open_key += row * keys_row + key_head * (CHUNK * LOCAL_WIDTH)
    open_log_decay += row * decays_row + key_head * CHUNK
    seen = tl.load(position + batch)
    slot = (seen % CHUNK).to(tl.int32) if CHUNK else 0
    columns = tl.arange(0, COLUMNS)
    of_value = value + batch * value_batch + key_head * value_head
    new_value = tl.load(of_value + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    decay = 0.0
    if log_decay is not None:
        decay = tl.load(log_decay + batch * decay_batch + key_head * decay_head).to(tl.float32)
    first_query = key_head * SHARED
    place = (head * PARTS + part) * SHARED
    if part == 0:
        tl.store(positions + head, seen)

    if part < BLOCKS:
        expanded_row = part * ROWS + tl.arange(0, ROWS)
        if POWER == 2:
            # ROWS divides a pair of tiles.
            first, second = tile_pair(part * ROWS // PAIR, (FEATURES + 15) // 16)
            left = first * TILE + (expanded_row % PAIR) // TILE
            right = second * TILE + expanded_row % TILE
            weight = tl.where(first == second, 1.0, 2.0)
        else:
            left, right = factor_columns(expanded_row, FEATURES) if FACTORS == 2 else (expanded_row, expanded_row)
            weight = 1.0
        of_sums = (
            sums + row * sums_row + key_head * (EXPANDED * WIDTH) + expanded_row[:, None] * WIDTH + columns[None, :]
        )
        inside = (expanded_row < EXPANDED)[:, None] & (columns < WIDTH)[None, :]
        of_normalizer = normalizer + row * normalizer_row + key_head * EXPANDED + expanded_row
        total = tl.load(of_sums, mask=inside, other=0.0).to(tl.float32)
        ones = tl.load(of_normalizer, mask=expanded_row < EXPANDED, other=0.0)
        of_key = key + batch * key_batch + key_head * key_head_stride
        if CHUNK == 0:
            new_key = _expanded(of_key, left, right, FEATURES, PRODUCTS)
            if log_decay is not None:
                total *= tl.exp(decay)
                ones *= tl.exp(decay)
            total += new_key[:, None] * new_value[None, :]
            ones += new_key
            tl.debug_barrier()  # threads may hold copies of what others write: all have read
            tl.store(of_sums, total, mask=inside)
            tl.store(of_normalizer, ones, mask=expanded_row < EXPANDED)
        for shared in tl.static_range(SHARED):
            of_query = query + batch * query_batch + (first_query + shared) * query_head
            expanded = _expanded(of_query, left, right, FEATURES, PRODUCTS) * weight
            numerator = tl.sum(expanded[:, None] * total, 0)
            tl.store(numerators + (place + shared) * WIDTH + columns, numerator, mask=columns < WIDTH)
            tl.store(denominators + place + shared, tl.sum(expanded * ones, 0))

        if CHUNK != 0 and slot + 1 == CHUNK:
            # The new token's slot is written by the next launch: here it comes from the inputs.
            since_all = 0.0
            if log_decay is not None:
                since_all = _sum(open_log_decay, CHUNK) + decay
            folded = tl.zeros((ROWS, COLUMNS), tl.float32)
            folded_ones = tl.zeros((ROWS,), tl.float32)
            before = 0.0
            for start in tl.range(0, CHUNK, FOLDED, num_stages=1):
                tokens = start + tl.arange(0, FOLDED)
                kept, newest = tokens < slot, tokens == slot
                of_features = open_features + tokens[None, :] * FEATURES
                products = tl.load(of_features + left[:, None], (left < FEATURES)[:, None] & kept[None, :], 0.0)
                new = tl.load(of_key + left, mask=left < FEATURES, other=0.0).to(tl.float32)
                products = tl.where(newest[None, :], new[:, None], products)
                if PRODUCTS:
                    others = tl.load(of_features + right[:, None], (right < FEATURES)[:, None] & kept[None, :], 0.0)
                    new = tl.load(of_key + right, mask=right < FEATURES, other=0.0).to(tl.float32)
                    products *= tl.where(newest[None, :], new[:, None], others)
                of_values = open_value + tokens[:, None] * WIDTH + columns[None, :]
                values = tl.load(of_values, kept[:, None] & (columns < WIDTH)[None, :], 0.0)
                values = tl.where(newest[:, None], new_value[None, :], values)
                factor = (kept | newest).to(tl.float32)
                if log_decay is not None:
                    each = tl.load(open_log_decay + tokens, mask=kept, other=0.0)
                    each = tl.where(newest, decay, each)
                    factor *= tl.exp(since_all - before - tl.cumsum(each, 0))
                    before += tl.sum(each, 0)
                folded = tl.dot(products, values * factor[:, None], folded, input_precision=PRECISION)
                folded_ones += tl.sum(products * factor[None, :], 1)
            # Read again, so that they need no registers until here.
            total = tl.load(of_sums, mask=inside, other=0.0).to(tl.float32) * tl.exp(since_all) + folded
            ones = tl.load(of_normalizer, mask=expanded_row < EXPANDED, other=0.0) * tl.exp(since_all) + folded_ones
            tl.debug_barrier()
            tl.store(of_sums, total, mask=inside)
            tl.store(of_normalizer, ones, mask=expanded_row < EXPANDED)

    if CHUNK:
        start = (part - BLOCKS) * TOKENS
        if (part >= BLOCKS) & (start <= slot):
            tokens = start + tl.arange(0, TOKENS)
            kept, newest = tokens < slot, tokens == slot
            inner = tl.arange(0, LOCAL_COLUMNS)
            of_keys = open_key + tokens[:, None] * LOCAL_WIDTH + inner[None, :]
            keys = tl.load(of_keys, kept[:, None] & (inner < LOCAL_WIDTH)[None, :], 0.0)
            of_new = local_key + batch * local_key_batch + key_head * local_key_head
            new = tl.load(of_new + inner, mask=inner < LOCAL_WIDTH, other=0.0).to(tl.float32)
            keys = tl.where(newest[:, None], new[None, :], keys)
            of_values = open_value + tokens[:, None] * WIDTH + columns[None, :]
            values = tl.load(of_values, kept[:, None] & (columns < WIDTH)[None, :], 0.0)
            values = tl.where(newest[:, None], new_value[None, :], values)
            for shared in tl.static_range(SHARED):
                of_query = local_query + batch * local_query_batch + (first_query + shared) * local_query_head
                one = tl.load(of_query + inner, mask=inner < LOCAL_WIDTH, other=0.0).to(tl.float32)
                product = tl.sum(keys * one[None, :], 1)
                exact = tl.where(kept | newest, 1.0, 0.0)
                for _ in tl.static_range(DEGREE):
                    exact *= product
                numerator = tl.sum(exact[:, None] * values, 0)
                tl.store(numerators + (place + shared) * WIDTH + columns, numerator, mask=columns < WIDTH)
                tl.store(denominators + place + shared, tl.sum(exact, 0))


@triton.jit(
    do_not_specialize=[
        "key_batch",
        "key_head_stride",
        "value_batch",
        "value_head",
        "local_key_batch",
        "local_key_head",
        "decay_batch",
        "decay_head",
        "offset",
        "chunk",
    ]
)
def linear_extend_finish(
    output,
    mass,
    key,
    value,
    local_key,
    log_decay,
    state_log_decay,
    open_features,
    open_value,
    open_key,
    open_log_decay,
    position,
    rows,
    numerators,
    denominators,
    positions,
    features_row, values_row, keys_row, decays_row, total_row,
    key_batch, key_head_stride,
    value_batch, value_head,
    local_key_batch, local_key_head,
    decay_batch, decay_head,
    offset,
    chunk,
    BLOCKS: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    LOCAL_WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: one key head. Adds up what `linear_extend` left, and moves the open chunk and the position on.

    Shapes as there; output (batch, heads, WIDTH), mass (batch, heads), state_log_decay (batch, KEY_HEADS).
    """
    PARTS: tl.constexpr = BLOCKS + LOCAL_BLOCKS
    head = tl.program_id(0).to(tl.int64)
    batch, key_head = head // KEY_HEADS, head % KEY_HEADS
    row = batch if rows is None else tl.load(rows + batch)
    open_log_decay += row * decays_row + key_head * CHUNK
    # Not from `position`: the program of another head may already have moved it.
    seen = tl.load(positions + head)
    slot = (seen % CHUNK).to(tl.int32) if CHUNK else 0
    columns = tl.arange(0, COLUMNS)
    decay = 0.0
    since_all = 0.0
    if log_decay is not None:
        decay = tl.load(log_decay + batch * decay_batch + key_head * decay_head).to(tl.float32)
        since_all = decay
        if CHUNK:
            since_all += _sum(open_log_decay, CHUNK)
    for shared in tl.static_range(SHARED):
        place = head * PARTS * SHARED + shared
        numerator, denominator = _added(
            numerators, denominators, place, 0, BLOCKS, columns, SHARED, WIDTH, COLUMNS, PARTS_AT_ONCE
        )
        if CHUNK:
            exact, inside = _added(
                numerators, denominators, place, BLOCKS, BLOCKS + slot // TOKENS + 1, columns, SHARED, WIDTH, COLUMNS,
                PARTS_AT_ONCE,
            )  # fmt: skip
            numerator = numerator * tl.exp(since_all) + exact
            denominator = denominator * tl.exp(since_all) + inside
        denominator += offset
        if NORMALIZE:
            numerator *= reciprocal(denominator)
        tl.store(mass + head * SHARED + shared, denominator)
        of_output = output + (head * SHARED + shared) * WIDTH + columns
        tl.store(of_output, numerator.to(output.dtype.element_ty), mask=columns < WIDTH)

    # Addresses are made where they are used: so long as the answers are added up, registers are few.
    state_log_decay += row * total_row + key_head
    if CHUNK:
        full = slot + 1 == CHUNK
        open_features += row * features_row + key_head * (CHUNK * FEATURES)
        open_value += row * values_row + key_head * (CHUNK * WIDTH)
        open_key += row * keys_row + key_head * (CHUNK * LOCAL_WIDTH)
        of_key = key + batch * key_batch + key_head * key_head_stride
        of_value = value + batch * value_batch + key_head * value_head
        of_local = local_key + batch * local_key_batch + key_head * local_key_head
        _reopen(open_features, of_key, slot, full, chunk, FEATURES)
        _reopen(open_value, of_value, slot, full, chunk, WIDTH)
        _reopen(open_key, of_local, slot, full, chunk, LOCAL_WIDTH)
        if log_decay is not None:
            # The whole chunk was read above, by every thread that wrote none of it.
            tl.debug_barrier()
            if full:
                _clear(open_log_decay, chunk)
                tl.store(state_log_decay, tl.load(state_log_decay) + since_all)
            else:
                tl.store(open_log_decay + slot, decay)
    elif log_decay is not None:
        tl.store(state_log_decay, tl.load(state_log_decay) + decay)
    if key_head == 0:
        tl.store(position + batch, seen + 1)


@triton.jit
def _expanded(pointer, left, right, FEATURES: tl.constexpr, PRODUCTS: tl.constexpr):
    """Some expanded rows of one vector of features."""
    x = tl.load(pointer + left, mask=left < FEATURES, other=0.0).to(tl.float32)
    if PRODUCTS:
        x *= tl.load(pointer + right, mask=right < FEATURES, other=0.0).to(tl.float32)
    return x


@triton.jit
def _sum(pointer, COUNT: tl.constexpr):
    """Of COUNT numbers."""
    POWER_OF_TWO: tl.constexpr = triton.next_power_of_2(COUNT)
    index = tl.arange(0, POWER_OF_TWO)
    return tl.sum(tl.load(pointer + index, mask=index < COUNT, other=0.0), 0)


@triton.jit
def _added(
    numerators, denominators, place, begin, end, columns,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PARTS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The sums of parts begin..end of one query head."""
    parts = tl.arange(0, PARTS_AT_ONCE)
    numerator = tl.zeros((PARTS_AT_ONCE, COLUMNS), tl.float32)
    denominator = tl.zeros((PARTS_AT_ONCE,), tl.float32)
    for start in tl.range(begin, end, PARTS_AT_ONCE, num_stages=1):
        real = start + parts < end
        entry = place + (start + parts) * SHARED
        mask = real[:, None] & (columns < WIDTH)[None, :]
        numerator += tl.load(numerators + entry[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
        denominator += tl.load(denominators + entry, mask=real, other=0.0)
    return tl.sum(numerator, 0), tl.sum(denominator, 0)


@triton.jit
def _reopen(opened, new, slot, full, chunk, WIDTH: tl.constexpr):
    """Put the new token into its slot of an open chunk, or empty one that is full."""
    if full:
        _clear(opened, chunk * WIDTH)
    else:
        POWER_OF_TWO: tl.constexpr = triton.next_power_of_2(WIDTH)
        columns = tl.arange(0, POWER_OF_TWO)
        x = tl.load(new + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        tl.store(opened + slot * WIDTH + columns, x, mask=columns < WIDTH)


@triton.jit
def _clear(pointer, count):
    """Make so many numbers zero. No constant: the compiler would unroll it all, into registers that spill."""
    AT_ONCE: tl.constexpr = 1024
    index = tl.arange(0, AT_ONCE)
    for start in tl.range(0, count, AT_ONCE):
        tl.store(pointer + start + index, tl.zeros((AT_ONCE,), tl.float32), mask=start + index < count)
