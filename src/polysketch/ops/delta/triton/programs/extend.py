"""The next token of every row by the delta rule, against sums that move on in place.

    e = s (v - E(k) S)        S' = S + E(k)^T e        o = E(q) S'

Columns of values know nothing of one another. A program has some columns of a head: it asks all rows of the sums for
the key, then reads them again, out of the caches, writes them, and answers the first query; further queries read them
once more each.
"""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.shared import expanded_rows, factor_columns


@triton.jit(
    do_not_specialize=[
        "query_batch",
        "query_head",
        "key_batch",
        "key_head_stride",
        "value_batch",
        "value_head",
        "strength_batch",
        "strength_head",
    ]
)
def delta_extend(
    query,
    key,
    value,
    strength,
    sums,
    normalizer,
    rows,
    output,
    sums_row, normalizer_row,
    query_batch, query_head,
    key_batch, key_head_stride,
    value_batch, value_head,
    strength_batch, strength_head,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    FEATURES: tl.constexpr,
    FACTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of one key head.

    Shapes, float32: the token's query (batch, KEY_HEADS x SHARED, FEATURES), key (batch, KEY_HEADS, FEATURES), value
    (.., WIDTH), strength (batch, KEY_HEADS); output as the query, of WIDTH, contiguous. sums, perhaps in half
    precision, and normalizer as in `LinearAttentionState`, each row in one piece, with their strides of rows; `rows`
    (batch,) says which row each of the batch has, its own where it is None.
    """
    EXPANDED: tl.constexpr = expanded_rows(FEATURES, 1, FACTORS)
    BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    number = tl.program_id(0)
    block = number % BLOCKS
    head = (number // BLOCKS).to(tl.int64)
    batch, key_head = head // KEY_HEADS, head % KEY_HEADS
    row = batch if rows is None else tl.load(rows + batch)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    sums += row * sums_row + key_head * (EXPANDED * WIDTH)
    normalizer += row * normalizer_row + key_head * EXPANDED
    key += batch * key_batch + key_head * key_head_stride
    query += batch * query_batch + key_head * SHARED * query_head
    output += head * (SHARED * WIDTH)

    found = tl.zeros((COLUMNS,), tl.float32)
    for start in tl.range(0, EXPANDED, ROWS):
        places = start + tl.arange(0, ROWS)
        inside = (places < EXPANDED)[:, None] & (columns < WIDTH)[None, :]
        kept = tl.load(sums + places[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        found += tl.sum(_expanded(key, places, FEATURES, FACTORS)[:, None] * kept, 0)
    wanted = tl.load(value + batch * value_batch + key_head * value_head + columns, mask=columns < WIDTH, other=0.0)
    share = tl.load(strength + batch * strength_batch + key_head * strength_head)
    error = share * (wanted - found)

    for shared in tl.static_range(SHARED):
        answer = tl.zeros((COLUMNS,), tl.float32)
        for start in tl.range(0, EXPANDED, ROWS):
            places = start + tl.arange(0, ROWS)
            inside = (places < EXPANDED)[:, None] & (columns < WIDTH)[None, :]
            of_sums = sums + places[:, None] * WIDTH + columns[None, :]
            kept = tl.load(of_sums, mask=inside, other=0.0).to(tl.float32)
            if shared == 0:
                written = _expanded(key, places, FEATURES, FACTORS)
                kept += written[:, None] * error[None, :]
                tl.debug_barrier()  # threads may hold copies of what others write: all have read
                tl.store(of_sums, kept, mask=inside)
                if block == 0:
                    of_ones = normalizer + places
                    ones = tl.load(of_ones, mask=places < EXPANDED, other=0.0) + written
                    tl.debug_barrier()
                    tl.store(of_ones, ones, mask=places < EXPANDED)
            asked = _expanded(query + shared * query_head, places, FEATURES, FACTORS)
            answer += tl.sum(asked[:, None] * kept, 0)
        tl.store(output + shared * WIDTH + columns, answer, mask=columns < WIDTH)
        if SHARED > 1:
            tl.debug_barrier()  # the next query may read by other threads than have written


@triton.jit
def _expanded(pointer, places, FEATURES: tl.constexpr, FACTORS: tl.constexpr):
    """Some expanded rows of one vector of features."""
    if FACTORS == 1:
        return tl.load(pointer + places, mask=places < FEATURES, other=0.0)
    else:
        left, right = factor_columns(places, FEATURES)
        first = tl.load(pointer + left, mask=left < FEATURES, other=0.0)
        return first * tl.load(pointer + right, mask=right < FEATURES, other=0.0)
