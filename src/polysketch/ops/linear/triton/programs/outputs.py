"""Outputs of linear attention: what each query reads from the sums before its chunk, and the weights inside the chunk.

    numerator_i = factor_i E(q_i) S_c + sum over the keys j of chunk c that i may see of w_ij v_j

w_ij = (inner_q_i . inner_k_j)^exponent: exact local weights, or the sketched ones, which may decay; with two factors
they are the product of the scores of both halves. Every block of queries is a program of its own.
"""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.shared import (
    expanded_rows,
    load_columns,
    load_rows,
    power,
    read_sums,
    reciprocal,
    store_rows,
)


@triton.constexpr_function
def step_within(depth, width):
    """Columns that a product takes at once: no more than cover the width."""
    return min(depth, max(16, 1 << (width - 1).bit_length()))


@triton.jit
def scores(
    query, key, query_tokens, query_stride, key_tokens, key_stride, query_seen, key_seen,
    INNER: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """(QUERIES, KEYS) products of rows of width INNER, DEPTH columns at a time."""
    STEP: tl.constexpr = step_within(DEPTH, INNER)
    found = tl.zeros((QUERIES, KEYS), tl.float32)
    if INNER <= 2 * STEP:
        for start in tl.static_range(0, INNER, STEP):
            columns = start + tl.arange(0, STEP)
            left = load_rows(query, query_tokens, query_stride, columns, query_seen, INNER).to(DOT)
            right = load_columns(key, key_tokens, key_stride, columns, key_seen, INNER).to(DOT)
            found = tl.dot(left, right, found, input_precision=PRECISION)
    else:
        for start in range(0, INNER, STEP):
            columns = start + tl.arange(0, STEP)
            left = load_rows(query, query_tokens, query_stride, columns, query_seen, INNER).to(DOT)
            right = load_columns(key, key_tokens, key_stride, columns, key_seen, INNER).to(DOT)
            found = tl.dot(left, right, found, input_precision=PRECISION)
    return found


@triton.jit
def visible(query_place, key_place, query_seen, key_seen, DIAGONAL: tl.constexpr):
    """(queries, keys) bool of what a query may see inside its chunk; 1 is causal, b > 1 blocks of b, -1 everything."""
    both = query_seen[:, None] & key_seen[None, :]
    if DIAGONAL > 1:
        both &= query_place[:, None] >= (key_place // DIAGONAL * DIAGONAL)[None, :]
    return both & (query_place[:, None] >= key_place[None, :]) if DIAGONAL == 1 else both


@triton.jit
def last_visible(block, chunk, QUERIES: tl.constexpr, DIAGONAL: tl.constexpr):
    """How many keys of a chunk some query of a block of QUERIES may see."""
    last = (block + 1) * QUERIES
    if DIAGONAL > 1:
        last = tl.cdiv(last, DIAGONAL) * DIAGONAL
    return tl.minimum(chunk, last) if DIAGONAL > 0 else chunk


@triton.jit(do_not_specialize=["offset", "length", "chunk", "chunks"])
def linear_outputs(
    query, value, inner_query, inner_key,
    factor, since,
    states, state_normalizers,
    output, denominators,
    query_batch, query_head, query_token,
    value_batch, value_head, value_token,
    inner_query_batch, inner_query_head, inner_query_token,
    inner_key_batch, inner_key_head, inner_key_token,
    offset, length, chunk, chunks,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    POWER: tl.constexpr,
    FACTORS: tl.constexpr,
    EXPONENT: tl.constexpr,
    INNER_FACTORS: tl.constexpr,
    DIAGONAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SKIP_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES queries of one chunk of one head, COLUMNS columns of the output.

    Shapes: query (batch, HEADS, length, FEATURES), value (batch, HEADS / SHARED, length, WIDTH), inner tensors of width
    INNER, factor and since (batch, HEADS / SHARED, length) or None: the decay since the chunk began, its exponential
    and itself; states as `linear_fold` writes them. `output` and `denominators` are contiguous. DIAGONAL 0: nothing
    inside the chunk. SKIP_FIRST: nothing comes before the first chunk, whose sums are not read.
    """
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    PART: tl.constexpr = INNER // INNER_FACTORS
    number = tl.program_id(0)
    column_block = number % COLUMN_BLOCKS
    blocks = tl.cdiv(chunk, QUERIES)
    # Late blocks of a chunk have the most keys before them: they begin first.
    block = blocks - 1 - (number // COLUMN_BLOCKS) % blocks
    index = (number // (COLUMN_BLOCKS * blocks)) % chunks
    row = (number // (COLUMN_BLOCKS * blocks) // chunks).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    key_head = head // SHARED
    key_row = batch * (HEADS // SHARED) + key_head

    # Keys count from the chunk's first token, queries from the block's: what is not causal is one chunk of any length.
    first = (index * chunk).to(tl.int64)
    start = first + block * QUERIES
    queries = tl.arange(0, QUERIES)
    places = block * QUERIES + queries
    seen = (places < chunk) & (first + places < length)
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    EXPANDED: tl.constexpr = expanded_rows(FEATURES, POWER, FACTORS)
    state = key_row * chunks + index
    numerator = tl.zeros((QUERIES, COLUMNS), tl.float32)
    denominator = tl.zeros((QUERIES,), tl.float32)
    if not (SKIP_FIRST and index == 0):
        numerator, denominator = read_sums(
            query + batch * query_batch + head * query_head + start * query_token,
            queries, query_token, seen,
            states + state * EXPANDED * WIDTH,
            state_normalizers + state * EXPANDED,
            columns, FEATURES, WIDTH, POWER, FACTORS, PRECISION, DOT, QUERIES, COLUMNS, ROWS,
        )  # fmt: skip
        if factor is not None:
            decay = tl.load(factor + key_row * length + start + queries, mask=seen, other=0.0)
            numerator *= decay[:, None]
            denominator *= decay
    if DIAGONAL != 0:
        of_query = inner_query + batch * inner_query_batch + head * inner_query_head + start * inner_query_token
        of_key = inner_key + batch * inner_key_batch + key_head * inner_key_head + first * inner_key_token
        of_value = value + batch * value_batch + key_head * value_head + first * value_token
        last = last_visible(block, chunk, QUERIES, DIAGONAL)
        last = tl.minimum(last, length - first).to(tl.int32)
        for key_start in range(0, last, KEYS):
            keys = key_start + tl.arange(0, KEYS)
            key_seen = keys < last
            weight = scores(
                of_query, of_key, queries, inner_query_token, keys, inner_key_token, seen, key_seen,
                PART, PRECISION, DOT, QUERIES, KEYS, DEPTH,
            )  # fmt: skip
            weight = power(weight, EXPONENT)
            if INNER_FACTORS == 2:
                weight *= scores(
                    of_query + PART, of_key + PART, queries, inner_query_token, keys, inner_key_token, seen, key_seen,
                    PART, PRECISION, DOT, QUERIES, KEYS, DEPTH,
                )  # fmt: skip
            if since is not None:
                at_query = tl.load(since + key_row * length + start + queries, mask=seen, other=0.0)
                at_key = tl.load(since + key_row * length + first + keys, mask=key_seen, other=0.0)
                weight *= tl.exp(tl.minimum(at_query[:, None] - at_key[None, :], 0.0))
            weight = tl.where(visible(places, keys, seen, key_seen, DIAGONAL), weight, 0.0)
            denominator += tl.sum(weight, 1)
            found = load_rows(of_value, keys, value_token, columns, key_seen, WIDTH).to(DOT)
            numerator = tl.dot(weight.to(DOT), found, numerator, input_precision=PRECISION)

    denominator += offset
    if NORMALIZE:
        numerator *= reciprocal(denominator)[:, None]
    here = row * length + start
    store_rows(output + here * WIDTH, numerator, queries, columns, seen, WIDTH)
    if column_block == 0:
        tl.store(denominators + here + queries, denominator, seen)
