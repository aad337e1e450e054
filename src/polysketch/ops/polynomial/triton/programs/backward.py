"""Gradients of exact polynomial attention: of queries, then of keys and values; weights are computed again.

With f_i = scale / denominator_i^(1 / DEGREE) and s_ij = f_i q_i . k_j, weights come out divided by their denominators,
p_ij = s_ij^DEGREE <= 1, so that no power overflows and no gradient is lost by a huge denominator:

    slope_ij = s_ij^(DEGREE - 1) (grad_output_i . v_j - grad_output_i . output_i)
    grad_q_i = DEGREE f_i sum_j slope_ij k_j
    grad_k_j = DEGREE sum_i slope_ij f_i q_i        grad_v_j = sum_i p_ij grad_output_i

Every program adds up its sums in one order, so results are the same at each run. Dtypes are those of the forward pass;
the difference is taken in float32, from an output that was not rounded.
"""

import triton
import triton.language as tl

from polysketch.ops.polynomial.triton.programs.forward import (
    as_operand,
    at,
    is_past,
    load_block,
    load_keys,
    power,
    row_block,
    store_block,
    visible_keys,
)


@triton.jit(do_not_specialize=["query_length", "key_length", "first_position"])
def polynomial_grad_query(
    query,
    key,
    value,
    key_mask,
    output,
    rounding,
    grad_output,
    factor,
    grad_query,
    pairs,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    grad_batch, grad_head, grad_token,
    query_length,
    key_length,
    first_position,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    DEGREE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One program: a block of rows of one query head; under CAUSAL the longest first.

    Shapes: as in the forward program; grad_output like output, grad_query (batch, heads, query_length, HEAD), factor
    f_i (batch, heads, query_length) and, written for the other program, pairs (batch, heads, query_length, 2), f_i and
    f_i (grad_output_i . output_i).
    """
    block, head, batch, query_heads = row_block(query_length, ROWS, KEY_HEADS, SHARED, CAUSAL)
    first = block * ROWS
    seen = first + tl.arange(0, ROWS) < query_length
    of_query = at(query, batch, query_batch, head, query_head, first, query_token)
    queries = load_block(of_query, query_token, seen, HEAD, HEAD_BLOCK, True)
    of_grad = at(grad_output, batch, grad_batch, head, grad_head, first, grad_token)
    upstream = load_block(of_grad, grad_token, seen, WIDTH, WIDTH_BLOCK, True)
    row = query_heads * query_length + first
    result = load_block(output + row * WIDTH, WIDTH, seen, WIDTH, WIDTH_BLOCK, True).to(tl.float32)
    if rounding is not None:
        result += load_block(rounding + row * WIDTH, WIDTH, seen, WIDTH, WIDTH_BLOCK, True).to(tl.float32)
    term = tl.sum(upstream.to(tl.float32) * result, 1)
    factors = tl.load(factor + row + tl.arange(0, ROWS), mask=seen, other=0.0)
    places = pairs + (row + tl.arange(0, ROWS)) * 2
    tl.store(places, factors, seen)
    tl.store(places + 1, term * factors, seen)
    of_key = at(key, batch, key_batch, head // SHARED, key_head, 0, key_token)
    of_value = at(value, batch, value_batch, head // SHARED, value_head, 0, value_token)
    of_mask = None if key_mask is None else key_mask + batch * key_length
    position = first_position + first
    whole, visible = visible_keys(position, key_length, ROWS, KEYS, CAUSAL)

    total = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
    for edge in tl.static_range(2):  # blocks that every row sees whole, then the others
        begin = whole if edge else 0
        end = visible if edge else whole
        for start in tl.range(begin, end, KEYS, num_stages=1 if edge else None):
            keys, values = load_keys(
                of_key, key_token, of_value, value_token, of_mask, start, key_length,
                HEAD, WIDTH, HEAD_BLOCK, WIDTH_BLOCK, KEYS, edge,
            )  # fmt: skip
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * factors[:, None]
            grad_weights = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
            slope = power(scores, DEGREE - 1) * (grad_weights - term[:, None])
            if edge and CAUSAL:
                slope = tl.where(is_past(position, start, ROWS, KEYS), slope, 0.0)
            total = tl.dot(as_operand(slope, PRECISION, DOT), keys.to(DOT), total, input_precision=PRECISION)
    total *= (DEGREE * factors)[:, None]
    store_block(grad_query + row * HEAD, total, seen, HEAD, HEAD_BLOCK, ROWS)


@triton.jit(do_not_specialize=["query_length", "key_length", "first_position"])
def polynomial_grad_key_value(
    query,
    key,
    value,
    key_mask,
    grad_output,
    pairs,
    grad_key,
    grad_value,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    grad_batch, grad_head, grad_token,
    query_length,
    key_length,
    first_position,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    DEGREE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One program: a block of keys of one key head, and in turn the rows of all of its query heads that see them.

    Shapes: as in the other program; grad_key (batch, KEY_HEADS, key_length, HEAD), grad_value with WIDTH. Products
    are transposed, (KEYS, ROWS), so that the left operand of the sums stays in registers.
    """
    blocks = tl.cdiv(key_length, KEYS)
    start = tl.program_id(0) % blocks * KEYS
    key_heads = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = key_heads // KEY_HEADS, key_heads % KEY_HEADS
    of_mask = None if key_mask is None else key_mask + batch * key_length
    keys, values = load_keys(
        at(key, batch, key_batch, head, key_head, 0, key_token), key_token,
        at(value, batch, value_batch, head, value_head, 0, value_token), value_token,
        of_mask, start, key_length, HEAD, WIDTH, HEAD_BLOCK, WIDTH_BLOCK, KEYS, True,
    )  # fmt: skip
    visible, whole, end = seeing_rows(start - first_position, query_length, ROWS, KEYS, CAUSAL)
    partly = (whole - visible) // ROWS

    total_key = tl.zeros((KEYS, HEAD_BLOCK), tl.float32)
    total_value = tl.zeros((KEYS, WIDTH_BLOCK), tl.float32)
    for edge in tl.static_range(2):  # blocks of rows that see all of the keys; then the others, the last one too
        blocks_of_rows = partly + tl.cdiv(query_length, ROWS) - end // ROWS if edge else (end - whole) // ROWS
        for item in tl.range(0, SHARED * blocks_of_rows, num_stages=1 if edge else None):
            member = item // blocks_of_rows if SHARED > 1 else 0
            number = item - member * blocks_of_rows
            if edge:
                first = tl.where(number < partly, visible + number * ROWS, end + (number - partly) * ROWS)
            else:
                first = whole + number * ROWS
            seen = first + tl.arange(0, ROWS) < query_length
            row = (key_heads * SHARED + member) * query_length + first
            of_query = at(query, batch, query_batch, head * SHARED + member, query_head, first, query_token)
            of_grad = at(grad_output, batch, grad_batch, head * SHARED + member, grad_head, first, grad_token)
            queries = load_block(of_query, query_token, seen, HEAD, HEAD_BLOCK, edge)
            upstream = load_block(of_grad, grad_token, seen, WIDTH, WIDTH_BLOCK, edge)
            factors, shifts = tl.split(load_block(pairs + row * 2, 2, seen, 2, 2, edge))
            scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * factors[None, :]
            slope = power(scores, DEGREE - 1)
            weights = slope * scores
            if edge and CAUSAL:
                past = tl.trans(is_past(first_position + first, start, ROWS, KEYS))
                slope = tl.where(past, slope, 0.0)
                weights = tl.where(past, weights, 0.0)
            weights = as_operand(weights, PRECISION, DOT)
            total_value = tl.dot(weights, upstream.to(DOT), total_value, input_precision=PRECISION)
            grad_weights = tl.dot(values, tl.trans(upstream), input_precision=PRECISION)
            slope = as_operand(slope * (grad_weights * factors[None, :] - shifts[None, :]), PRECISION, DOT)
            total_key = tl.dot(slope, queries.to(DOT), total_key, input_precision=PRECISION)

    inside = start + tl.arange(0, KEYS) < key_length
    place = key_heads * key_length + start
    store_block(grad_key + place * HEAD, total_key * DEGREE, inside, HEAD, HEAD_BLOCK, KEYS)
    store_block(grad_value + place * WIDTH, total_value, inside, WIDTH, WIDTH_BLOCK, KEYS)


@triton.jit
def seeing_rows(first, query_length, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """(a, b, c): the rows a to b see some of a block of keys, b to c all of them, c to the end too.

    All are multiples of ROWS; no block of rows before c passes the end. Where none sees any, b comes before a. `first`
    is the row that stands where the first key of the block does, negative where all rows come later.
    """
    end = query_length // ROWS * ROWS
    if CAUSAL:
        visible = tl.maximum(first, 0) // ROWS * ROWS
        whole = tl.cdiv(tl.maximum(first + KEYS - 1, 0), ROWS) * ROWS
        return visible, tl.minimum(whole, end), end
    return 0, 0, end
