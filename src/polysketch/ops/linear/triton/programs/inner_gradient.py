"""Gradients of linear attention through the weights inside chunks: exact local weights, or sketched ones.

With w_ij = s_ij^exponent decay_ij of a score s_ij, the loss changes with s_ij by the slope of w_ij times
(dN_i . v_j + dD_i), dN and dD being the gradients of a query's numerator and denominator. With two factors w_ij = s_ij
t_ij decay_ij, and the slope for one of the scores is the other, decayed. Scores are made again.
"""

import triton
import triton.language as tl

from polysketch.ops.linear.triton.programs.outputs import last_visible, scores, visible
from polysketch.ops.triton.programs.shared import load_columns, load_rows, power, store_rows


@triton.jit
def weight_and_slope(score, since, at_query, at_key, mask, EXPONENT: tl.constexpr):
    """score^EXPONENT and its derivative, decayed and masked."""
    slope = power(score, EXPONENT - 1)
    if since is not None:
        slope *= tl.exp(tl.minimum(at_query - at_key, 0.0))
    slope = tl.where(mask, slope, 0.0)
    return slope * score, slope * EXPONENT


@triton.jit
def add_products(
    found, change, score, other, rows, tokens, stride, entries, seen,
    INNER: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """found + change rows; with two factors (INNER twice PART) of each half of the rows with the other's score."""
    if PART == INNER:
        operand = load_rows(rows, tokens, stride, entries, seen, INNER).to(DOT)
        found = tl.dot(change.to(DOT), operand, found, input_precision=PRECISION)
    else:
        first = load_rows(rows, tokens, stride, entries, seen, PART).to(DOT)
        second = load_rows(rows, tokens, stride, tl.where(entries < PART, INNER, entries), seen, INNER).to(DOT)
        found = tl.dot((change * other).to(DOT), first, found, input_precision=PRECISION)
        found = tl.dot((change * score).to(DOT), second, found, input_precision=PRECISION)
    return found


@triton.jit(do_not_specialize=["length", "chunk", "chunks"])
def linear_inner_query_gradient(
    value, inner_query, inner_key, since, numerator_gradient, mass_gradient, gradient,
    value_batch, value_head, value_token,
    inner_query_batch, inner_query_head, inner_query_token,
    inner_key_batch, inner_key_head, inner_key_token,
    length, chunk, chunks,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    EXPONENT: tl.constexpr,
    INNER_FACTORS: tl.constexpr,
    DIAGONAL: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Gradients of QUERIES inner queries, DEPTH columns of them, through the weights inside their chunk.

    dN and dD (batch, HEADS, length, ...) and `gradient` (batch, HEADS, length, INNER) are contiguous; ADD adds to what
    stands there. COLUMNS cover WIDTH.
    """
    DEPTHS: tl.constexpr = (INNER + DEPTH - 1) // DEPTH
    PART: tl.constexpr = INNER // INNER_FACTORS
    number = tl.program_id(0)
    depth = number % DEPTHS
    blocks = tl.cdiv(chunk, QUERIES)
    block = blocks - 1 - (number // DEPTHS) % blocks
    index = (number // (DEPTHS * blocks)) % chunks
    row = (number // (DEPTHS * blocks) // chunks).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    key_head = head // SHARED
    key_row = batch * (HEADS // SHARED) + key_head
    first = (index * chunk).to(tl.int64)
    places = block * QUERIES + tl.arange(0, QUERIES)
    seen = (places < chunk) & (first + places < length)
    columns = tl.arange(0, COLUMNS)
    entries = depth * DEPTH + tl.arange(0, DEPTH)
    here = row * length + first
    of_query = inner_query + batch * inner_query_batch + head * inner_query_head + first * inner_query_token
    of_key = inner_key + batch * inner_key_batch + key_head * inner_key_head + first * inner_key_token
    of_value = value + batch * value_batch + key_head * value_head + first * value_token
    upstream = load_rows(numerator_gradient + here * WIDTH, places, WIDTH, columns, seen, WIDTH).to(DOT)
    mass = tl.load(mass_gradient + here + places, mask=seen, other=0.0)
    found = tl.zeros((QUERIES, DEPTH), tl.float32)
    last = last_visible(block, chunk, QUERIES, DIAGONAL)
    last = tl.minimum(last, length - first).to(tl.int32)
    for start in range(0, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        key_seen = keys < last
        score = scores(
            of_query, of_key, places, inner_query_token, keys, inner_key_token, seen, key_seen,
            PART, PRECISION, DOT, QUERIES, KEYS, DEPTH,
        )  # fmt: skip
        other = score
        if INNER_FACTORS == 2:
            other = scores(
                of_query + PART, of_key + PART, places, inner_query_token, keys, inner_key_token, seen, key_seen,
                PART, PRECISION, DOT, QUERIES, KEYS, DEPTH,
            )  # fmt: skip
        at_query, at_key = 0.0, 0.0
        if since is not None:
            at_query = tl.load(since + key_row * length + first + places, mask=seen, other=0.0)[:, None]
            at_key = tl.load(since + key_row * length + first + keys, mask=key_seen, other=0.0)[None, :]
        mask = visible(places, keys, seen, key_seen, DIAGONAL)
        _, slope = weight_and_slope(score, since, at_query, at_key, mask, EXPONENT)
        of_values = load_columns(of_value, keys, value_token, columns, key_seen, WIDTH).to(DOT)
        change = (tl.dot(upstream, of_values, input_precision=PRECISION) + mass[:, None]) * slope
        found = add_products(
            found, change, score, other, of_key, keys, inner_key_token, entries, key_seen, INNER, PART, PRECISION, DOT
        )
    if ADD:
        found += load_rows(gradient + here * INNER, places, INNER, entries, seen, INNER).to(tl.float32)
    store_rows(gradient + here * INNER, found, places, entries, seen, INNER)


@triton.jit(do_not_specialize=["length", "chunk", "chunks"])
def linear_inner_key_gradient(
    value, inner_query, inner_key, since, numerator_gradient, mass_gradient, key_gradient, value_gradient,
    value_batch, value_head, value_token,
    inner_query_batch, inner_query_head, inner_query_token,
    inner_key_batch, inner_key_head, inner_key_token,
    length, chunk, chunks,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    EXPONENT: tl.constexpr,
    INNER_FACTORS: tl.constexpr,
    DIAGONAL: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Gradients of KEYS inner keys, DEPTH columns of them, and of their values, from all queries of their chunk.

    The values' is added to what stands in `value_gradient`, the keys' only with ADD. Otherwise as
    `linear_inner_query_gradient`.
    """
    DEPTHS: tl.constexpr = (INNER + DEPTH - 1) // DEPTH
    PART: tl.constexpr = INNER // INNER_FACTORS
    number = tl.program_id(0)
    depth = number % DEPTHS
    blocks = tl.cdiv(chunk, KEYS)
    block = (number // DEPTHS) % blocks  # early keys are seen by most queries
    index = (number // (DEPTHS * blocks)) % chunks
    key_row = (number // (DEPTHS * blocks) // chunks).to(tl.int64)
    batch, key_head = key_row // (HEADS // SHARED), key_row % (HEADS // SHARED)
    first = (index * chunk).to(tl.int64)
    keys = block * KEYS + tl.arange(0, KEYS)
    key_seen = (keys < chunk) & (first + keys < length)
    columns = tl.arange(0, COLUMNS)
    entries = depth * DEPTH + tl.arange(0, DEPTH)
    of_key = inner_key + batch * inner_key_batch + key_head * inner_key_head + first * inner_key_token
    of_value = value + batch * value_batch + key_head * value_head + first * value_token
    of_values = load_rows(of_value, keys, value_token, columns, key_seen, WIDTH).to(DOT)
    of_keys = tl.zeros((KEYS, DEPTH), tl.float32)
    for_values = tl.zeros((KEYS, COLUMNS), tl.float32)
    begin = block * KEYS
    if DIAGONAL > 1:
        begin = begin // DIAGONAL * DIAGONAL
    begin = begin // QUERIES if DIAGONAL > 0 else 0
    queries = tl.cdiv(tl.minimum(chunk, length - first).to(tl.int32), QUERIES) - begin
    for item in range(SHARED * queries):
        head = key_head * SHARED + item // queries
        places = (begin + item % queries) * QUERIES + tl.arange(0, QUERIES)
        seen = (places < chunk) & (first + places < length)
        here = (batch * HEADS + head) * length + first
        of_query = inner_query + batch * inner_query_batch + head * inner_query_head + first * inner_query_token
        score = scores(
            of_key, of_query, keys, inner_key_token, places, inner_query_token, key_seen, seen,
            PART, PRECISION, DOT, KEYS, QUERIES, DEPTH,
        )  # fmt: skip
        other = score
        if INNER_FACTORS == 2:
            other = scores(
                of_key + PART, of_query + PART, keys, inner_key_token, places, inner_query_token, key_seen, seen,
                PART, PRECISION, DOT, KEYS, QUERIES, DEPTH,
            )  # fmt: skip
        at_query, at_key = 0.0, 0.0
        if since is not None:
            at_query = tl.load(since + key_row * length + first + places, mask=seen, other=0.0)[None, :]
            at_key = tl.load(since + key_row * length + first + keys, mask=key_seen, other=0.0)[:, None]
        mask = tl.trans(visible(places, keys, seen, key_seen, DIAGONAL))
        weight, slope = weight_and_slope(score, since, at_query, at_key, mask, EXPONENT)
        if INNER_FACTORS == 2:
            weight *= other
        upstream = load_rows(numerator_gradient + here * WIDTH, places, WIDTH, columns, seen, WIDTH).to(DOT)
        for_values = tl.dot(weight.to(DOT), upstream, for_values, input_precision=PRECISION)
        mass = tl.load(mass_gradient + here + places, mask=seen, other=0.0)
        change = (tl.dot(of_values, tl.trans(upstream), input_precision=PRECISION) + mass[None, :]) * slope
        of_keys = add_products(
            of_keys, change, score, other, of_query, places, inner_query_token, entries, seen, INNER, PART, PRECISION,
            DOT,
        )  # fmt: skip
    here = key_row * length + first
    if ADD:
        of_keys += load_rows(key_gradient + here * INNER, keys, INNER, entries, key_seen, INNER).to(tl.float32)
    store_rows(key_gradient + here * INNER, of_keys, keys, entries, key_seen, INNER)
    if depth == 0:
        for_values += load_rows(value_gradient + here * WIDTH, keys, WIDTH, columns, key_seen, WIDTH).to(tl.float32)
        store_rows(value_gradient + here * WIDTH, for_values, keys, columns, key_seen, WIDTH)
