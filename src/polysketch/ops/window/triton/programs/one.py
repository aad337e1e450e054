"""Softmax of one query a head over the keys of a cache, which lie in rows of their own, and one key beside them."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "scale",
        "first",
        "last",
        "query_batch",
        "query_head",
        "logit_batch",
        "logit_head",
        "beside_batch",
        "beside_head",
        "key_head_stride",
        "key_token",
        "value_head",
        "value_token",
    ]
)
def window_one(
    query,
    key,
    value,
    key_mask,
    beside_logit,
    beside_value,
    rows,
    output,
    scale,
    first, last,
    query_batch, query_head,
    key_row, key_head_stride, key_token,
    value_row, value_head, value_token,
    mask_row,
    logit_batch, logit_head,
    beside_batch, beside_head,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: one query head, over the keys first..last - 1 of its row.

    Shapes: query (batch, HEADS, WIDTH), key (rows, HEADS / SHARED, keys, WIDTH), value (.., VALUE_WIDTH), key_mask
    (rows, keys) or None, beside_logit (batch, HEADS) and beside_value (.., VALUE_WIDTH) or None; `rows` (batch,) says
    which row of key, value and key_mask each of the batch has. output (batch, HEADS, VALUE_WIDTH), contiguous. DEPTH
    and COLUMNS are powers of two that cover the widths.
    """
    head = tl.program_id(0).to(tl.int64)
    batch, query_number = head // HEADS, head % HEADS
    key_head, row = query_number // SHARED, tl.load(rows + batch)
    inner, columns = tl.arange(0, DEPTH), tl.arange(0, COLUMNS)
    asked = tl.load(query + batch * query_batch + query_number * query_head + inner, mask=inner < WIDTH, other=0.0)
    asked = asked.to(tl.float32) * scale
    key += row * key_row + key_head * key_head_stride
    value += row * value_row + key_head * value_head

    peak, mass = -1e30, 0.0
    found = tl.zeros((COLUMNS,), tl.float32)
    if beside_logit is not None:
        logit = tl.load(beside_logit + batch * logit_batch + query_number * logit_head).to(tl.float32)
        of_beside = beside_value + batch * beside_batch + query_number * beside_head
        beside = tl.load(of_beside + columns, mask=columns < VALUE_WIDTH, other=0.0).to(tl.float32)
        is_beside = logit > -1e29
        peak = tl.where(is_beside, logit, peak)
        mass = tl.where(is_beside, 1.0, 0.0)
        found = tl.where(is_beside, beside, 0.0)
    for start in tl.range(first, last, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        seen = tokens < last
        if key_mask is not None:
            seen = seen & (tl.load(key_mask + row * mask_row + tokens, mask=seen, other=0) != 0)
        of_keys = key + tokens[:, None] * key_token + inner[None, :]
        keys = tl.load(of_keys, mask=seen[:, None] & (inner < WIDTH)[None, :], other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(keys * asked[None, :], 1), -1e30)
        higher = tl.maximum(peak, tl.max(scores, 0))
        weights = tl.where(seen, tl.exp(scores - higher), 0.0)
        of_values = value + tokens[:, None] * value_token + columns[None, :]
        values = tl.load(of_values, mask=seen[:, None] & (columns < VALUE_WIDTH)[None, :], other=0.0).to(tl.float32)
        carried = tl.exp(peak - higher)
        mass = mass * carried + tl.sum(weights, 0)
        found = found * carried + tl.sum(weights[:, None] * values, 0)
        peak = higher
    found = tl.where(mass > 0.0, found / tl.where(mass > 0.0, mass, 1.0), 0.0)
    tl.store(output + head * VALUE_WIDTH + columns, found.to(output.dtype.element_ty), mask=columns < VALUE_WIDTH)
