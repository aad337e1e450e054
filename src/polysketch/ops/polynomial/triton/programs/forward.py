"""Exact polynomial attention: output and denominator of every query, the weights never in memory.

    numerator_i = sum_j w_ij v_j        denominator_i = offset + sum_j w_ij        w_ij = (scale q_i . k_j)^DEGREE

No running maximum is needed, unlike softmax: both sums just add up over the blocks of keys that the rows see.

Dtypes. Scores are products of the inputs as they are, summed in float32: they cannot leave its range. Weights can leave
that of float16 (a score of 16 does at degree 4), so float16 values are widened to float32 for the second product, of
the tf32 kind. bfloat16 has the exponents of float32, and weights of bfloat16 inputs are rounded to it. Whatever form
the product takes of a weight is also what the denominator sums: output rows are then means under slightly other
weights, exactly, and what the backward pass subtracts from each other (grad_output . v_j and grad_output . output)
stays nearly equal where one weight holds most of the mass.
"""

import triton
import triton.language as tl

from polysketch.ops.triton.programs.shared import SMALLEST_NORMAL, as_float32


@triton.jit(do_not_specialize=["query_length", "key_length", "first_position"])
def polynomial_forward(
    query,
    key,
    value,
    key_mask,
    output,
    rounding,
    denominator,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    query_length,
    key_length,
    first_position,
    scale,
    offset,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    DEGREE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SCALE_QUERY: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One program: a block of rows of one query head; under CAUSAL the longest first.

    Shapes: query (batch, KEY_HEADS x SHARED, query_length, HEAD), key and value (batch, KEY_HEADS, key_length, HEAD or
    WIDTH), key_mask (batch, key_length); output and rounding, what the output lost when it was rounded to its dtype
    (None if nobody asks), (batch, heads, query_length, WIDTH), denominator without WIDTH. SCALE_QUERY: the scale
    multiplies the query, which must not round it, and not the scores.
    """
    block, head, batch, query_heads = row_block(query_length, ROWS, KEY_HEADS, SHARED, CAUSAL)
    first = block * ROWS
    seen = first + tl.arange(0, ROWS) < query_length
    of_query = at(query, batch, query_batch, head, query_head, first, query_token)
    queries = load_block(of_query, query_token, seen, HEAD, HEAD_BLOCK, True)
    if SCALE_QUERY:
        queries = (queries.to(tl.float32) * scale).to(queries.dtype)
    of_key = at(key, batch, key_batch, head // SHARED, key_head, 0, key_token)
    of_value = at(value, batch, value_batch, head // SHARED, value_head, 0, value_token)
    of_mask = None if key_mask is None else key_mask + batch * key_length
    position = first_position + first
    whole, visible = visible_keys(position, key_length, ROWS, KEYS, CAUSAL)

    numerator = tl.zeros((ROWS, WIDTH_BLOCK), tl.float32)
    total = tl.zeros((ROWS,), tl.float32) + offset
    for edge in tl.static_range(2):  # blocks that every row sees whole, then the others
        begin = whole if edge else 0
        end = visible if edge else whole
        for start in tl.range(begin, end, KEYS, num_stages=1 if edge else None):
            keys, values = load_keys(
                of_key, key_token, of_value, value_token, of_mask, start, key_length,
                HEAD, WIDTH, HEAD_BLOCK, WIDTH_BLOCK, KEYS, edge,
            )  # fmt: skip
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            if not SCALE_QUERY:
                scores *= scale
            weights = power(scores, DEGREE)
            if edge and CAUSAL:
                weights = tl.where(is_past(position, start, ROWS, KEYS), weights, 0.0)
            used = as_operand(weights, PRECISION, DOT)
            total += tl.sum(as_float32(used), 1)
            numerator = tl.dot(used, values.to(DOT), numerator, input_precision=PRECISION)

    # A finite numerator over an infinite denominator would be a wrong zero in silence.
    empty = tl.abs(total) < SMALLEST_NORMAL
    inverse = tl.where(total < float("inf"), tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total)), float("nan"))
    result = numerator * inverse[:, None]
    row = query_heads * query_length + first
    store_block(output + row * WIDTH, result, seen, WIDTH, WIDTH_BLOCK, ROWS)
    if rounding is not None:
        rest = result - as_float32(result.to(output.dtype.element_ty))
        store_block(rounding + row * WIDTH, rest, seen, WIDTH, WIDTH_BLOCK, ROWS)
    tl.store(denominator + row + tl.arange(0, ROWS), total, seen)


@triton.jit
def row_block(length, ROWS: tl.constexpr, KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, CAUSAL: tl.constexpr):
    """(number of this program's block of rows, its head, batch item, both as one number): blocks count fastest."""
    blocks = tl.cdiv(length, ROWS)
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block
    both = (tl.program_id(0) // blocks).to(tl.int64)
    return block, both % (KEY_HEADS * SHARED), both // (KEY_HEADS * SHARED), both


@triton.jit
def visible_keys(position, key_length, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """(a, b): all of the rows from `position` on see the first a keys, a multiple of KEYS; none sees a key past b."""
    if CAUSAL:
        return tl.minimum(position + 1, key_length) // KEYS * KEYS, tl.minimum(position + ROWS, key_length)
    return key_length // KEYS * KEYS, key_length


@triton.jit
def is_past(position, start, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """(ROWS, KEYS): whether a row sees a key, rows from `position` on, keys from `start` on."""
    return position + tl.arange(0, ROWS)[:, None] >= start + tl.arange(0, KEYS)[None, :]


@triton.jit
def at(tensor, batch, batch_stride, head, head_stride, token, token_stride):
    """Where a token of a head begins."""
    return tensor + batch * batch_stride + head * head_stride + tl.cast(token, tl.int64) * token_stride


@triton.jit
def load_block(tensor, stride, seen, SIZE: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr):
    """(rows, BLOCK) from `tensor` on; zero past SIZE columns and, where only SOME rows are seen, in the others."""
    rows = tl.arange(0, seen.shape[0])
    columns = tl.arange(0, BLOCK)
    places = tensor + rows[:, None] * stride + columns[None, :]
    if SOME and SIZE < BLOCK:
        return tl.load(places, mask=seen[:, None] & (columns < SIZE)[None, :], other=0.0)
    if SOME:
        return tl.load(places, mask=seen[:, None], other=0.0)
    if SIZE < BLOCK:
        return tl.load(places, mask=(columns < SIZE)[None, :], other=0.0)
    return tl.load(places)


@triton.jit
def load_keys(
    key, key_token, value, value_token, key_mask, start, key_length,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, HEAD_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    KEYS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """A block of keys and of values: zero where masked and, at an EDGE, past the end.

    A zero key has the weight 0^DEGREE = 0, exactly, and nothing that stands in the padding, NaN included, gets out.
    """
    SOME: tl.constexpr = EDGE or key_mask is not None
    seen = start + tl.arange(0, KEYS) < key_length
    if key_mask is not None:
        seen = seen & (tl.load(key_mask + start + tl.arange(0, KEYS), mask=seen, other=0) != 0)
    token = tl.cast(start, tl.int64)
    keys = load_block(key + token * key_token, key_token, seen, HEAD, HEAD_BLOCK, SOME)
    values = load_block(value + token * value_token, value_token, seen, WIDTH, WIDTH_BLOCK, SOME)
    return keys, values


@triton.jit
def store_block(
    tensor, content, seen, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Write rows of a contiguous tensor of SIZE columns."""
    columns = tl.arange(0, BLOCK)
    places = tensor + tl.arange(0, ROWS)[:, None] * SIZE + columns[None, :]
    tl.store(places, content.to(tensor.dtype.element_ty), seen[:, None] & (columns < SIZE)[None, :])


@triton.jit
def power(base, EXPONENT: tl.constexpr):
    """base^EXPONENT: square for every bit after the first, and multiply where it is set."""
    result = base
    for step in tl.static_range(30):
        if (EXPONENT >> (30 - step)) > 0:
            result = result * result
            if (EXPONENT >> (29 - step)) % 2 == 1:
                result = result * base
    return result


@triton.jit
def as_operand(weights, PRECISION: tl.constexpr, DOT: tl.constexpr):
    """What a product takes of float32 weights: rounded to bfloat16, or cut to the 10 bits of mantissa of tf32.

    Cut and not rounded, as the hardware does, so that the bits of a NaN stay those of one.
    """
    if tl.float32 == DOT and PRECISION == "tf32":
        return (weights.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return weights.to(DOT)
