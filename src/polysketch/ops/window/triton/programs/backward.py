"""Gradients of attention within windows: of queries and their keys beside, then of keys and values.

Weights are made again from scores and the logarithms of their sums. Shapes as in `forward.py`; output and log_mass are
what that program wrote, grad_output is like output and of any strides of batch, head and token.
"""

import triton
import triton.language as tl

from polysketch.ops.hyper.triton.programs.steps import HIDDEN
from polysketch.ops.triton.programs.shared import as_operand, load_rows, store_rows
from polysketch.ops.window.triton.programs.bounds import LOG2_E, UNSEEN, real_keys, seen_of


@triton.jit(do_not_specialize=["queries", "keys", "behind", "ahead", "block"])
def window_grad_query(
    query,
    key,
    value,
    key_mask,
    beside_logit,
    beside_value,
    output,
    log_mass,
    grad_output,
    mean,
    grad_query,
    grad_logit,
    grad_beside,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    mask_row,
    logit_batch, logit_head, logit_token,
    beside_batch, beside_head, beside_token,
    output_batch, output_head, output_token,
    queries,
    keys,
    behind,
    ahead,
    block,
    scale,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS queries of one head.

    Writes grad_query (batch, heads, queries, HEAD), grad_logit (batch, heads, queries) and grad_beside (.., WIDTH), and
    `mean` (batch, heads, queries), grad_output . output, for the other program; contiguous.
    """
    tiles = tl.cdiv(queries, ROWS)
    first = tl.program_id(0) % tiles * ROWS
    heads = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = heads // (KEY_HEADS * SHARED), heads % (KEY_HEADS * SHARED)
    places = first + tl.arange(0, ROWS)
    rows, asked = places.to(tl.int64), places < queries
    line = heads * queries + rows
    inner, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH_BLOCK)
    asking = load_rows(query + batch * query_batch + head * query_head, rows, query_token, inner, asked, HEAD)
    of_upstream = grad_output + batch * output_batch + head * output_head
    upstream = load_rows(of_upstream, rows, output_token, columns, asked, WIDTH)
    found = load_rows(output, line, WIDTH, columns, asked, WIDTH).to(tl.float32)
    means = tl.sum(upstream.to(tl.float32) * found, 1)
    tl.store(mean + line, means, asked)
    masses = tl.load(log_mass + line, mask=asked, other=UNSEEN)
    if beside_logit is not None:
        of_logit = beside_logit + batch * logit_batch + head * logit_head
        logit = tl.load(of_logit + rows * logit_token, mask=asked, other=0.0).to(tl.float32)
        of_beside = beside_value + batch * beside_batch + head * beside_head
        beside = load_rows(of_beside, rows, beside_token, columns, asked, WIDTH).to(tl.float32)
        weight = tl.exp2(logit * LOG2_E - masses)
        change = weight * (tl.sum(upstream.to(tl.float32) * beside, 1) - means)
        tl.store(grad_logit + line, change.to(grad_logit.dtype.element_ty), asked)
        store_rows(grad_beside, upstream.to(tl.float32) * weight[:, None], line, columns, asked, WIDTH)

    of_key = key + batch * key_batch + head // SHARED * key_head
    of_value = value + batch * value_batch + head // SHARED * value_head
    of_mask = None if key_mask is None else key_mask + batch * mask_row
    total = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
    earlier = keys - queries
    oldest, newest = seen_of(places, earlier, behind, ahead, block, BLOCKS)
    end = tl.minimum(tl.minimum(first + ROWS, queries) + earlier + ahead, keys)
    for start in tl.range(tl.maximum(first + earlier - behind, 0), end, KEYS):
        tokens, real = real_keys(of_mask, start, end, KEYS)
        near = load_rows(of_key, tokens.to(tl.int64), key_token, inner, real, HEAD)
        values = load_rows(of_value, tokens.to(tl.int64), value_token, columns, real, WIDTH)
        scores = tl.dot(asking, tl.trans(near), input_precision=PRECISION) * (scale * LOG2_E)
        seen = real[None, :] & (tokens[None, :] >= oldest[:, None]) & (tokens[None, :] <= newest[:, None])
        weights = tl.exp2(tl.where(seen, scores, HIDDEN) - masses[:, None])
        changes = weights * (tl.dot(upstream, tl.trans(values), input_precision=PRECISION) - means[:, None])
        total = tl.dot(as_operand(changes, DOT, PRECISION), near.to(DOT), total, input_precision=PRECISION)
    store_rows(grad_query, total * scale, line, inner, asked, HEAD)


@triton.jit(do_not_specialize=["queries", "keys", "behind", "ahead", "block"])
def window_grad_key_value(
    query,
    key,
    value,
    key_mask,
    log_mass,
    grad_output,
    mean,
    grad_key,
    grad_value,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    mask_row,
    output_batch, output_head, output_token,
    queries,
    keys,
    behind,
    ahead,
    block,
    scale,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One program: KEYS keys of one head, and the queries of all heads that share it, in order, that see any of them.

    `mean` is that of `window_grad_query`. Writes grad_key and grad_value, contiguous.
    """
    tiles = tl.cdiv(keys, KEYS)
    first = tl.program_id(0) % tiles * KEYS
    heads = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = heads // KEY_HEADS, heads % KEY_HEADS
    of_mask = None if key_mask is None else key_mask + batch * mask_row
    tokens, real = real_keys(of_mask, first, keys, KEYS)
    inner, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH_BLOCK)
    line = tokens.to(tl.int64)
    near = load_rows(key + batch * key_batch + head * key_head, line, key_token, inner, real, HEAD)
    values = load_rows(value + batch * value_batch + head * value_head, line, value_token, columns, real, WIDTH)

    total_key = tl.zeros((KEYS, HEAD_BLOCK), tl.float32)
    total_value = tl.zeros((KEYS, WIDTH_BLOCK), tl.float32)
    earlier = keys - queries
    begin = tl.maximum(first - earlier - ahead, 0)
    end = tl.minimum(tl.minimum(first + KEYS, keys) - earlier + behind, queries)
    pieces = tl.cdiv(tl.maximum(end - begin, 0), ROWS)
    for item in tl.range(0, SHARED * pieces):
        member = head * SHARED + item // pieces
        places = begin + item % pieces * ROWS + tl.arange(0, ROWS)
        rows, asked = places.to(tl.int64), places < end
        of_rows = (batch * KEY_HEADS * SHARED + member) * queries + rows
        of_query = query + batch * query_batch + member * query_head
        asking = load_rows(of_query, rows, query_token, inner, asked, HEAD)
        of_upstream = grad_output + batch * output_batch + member * output_head
        upstream = load_rows(of_upstream, rows, output_token, columns, asked, WIDTH)
        masses = tl.load(log_mass + of_rows, mask=asked, other=UNSEEN)
        means = tl.load(mean + of_rows, mask=asked, other=0.0)
        oldest, newest = seen_of(places, earlier, behind, ahead, block, BLOCKS)
        scores = tl.dot(near, tl.trans(asking), input_precision=PRECISION) * (scale * LOG2_E)
        seen = real[:, None] & (tokens[:, None] >= oldest[None, :]) & (tokens[:, None] <= newest[None, :])
        weights = tl.exp2(tl.where(seen, scores, HIDDEN) - masses[None, :])
        changes = weights * (tl.dot(values, tl.trans(upstream), input_precision=PRECISION) - means[None, :])
        weighing, changing = as_operand(weights, DOT, PRECISION), as_operand(changes, DOT, PRECISION)
        total_value = tl.dot(weighing, upstream.to(DOT), total_value, input_precision=PRECISION)
        total_key = tl.dot(changing, asking.to(DOT), total_key, input_precision=PRECISION)

    inside = tokens < keys
    store_rows(grad_key, total_key * scale, heads * keys + line, inner, inside, HEAD)
    store_rows(grad_value, total_value, heads * keys + line, columns, inside, WIDTH)
