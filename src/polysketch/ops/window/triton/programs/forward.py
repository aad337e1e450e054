"""Attention of a tile of queries to the keys of their windows, and to the key beside of each.

Shapes of all programs of a window: query (batch, KEY_HEADS x SHARED, queries, HEAD), key and value (batch, KEY_HEADS,
keys, HEAD or WIDTH), key_mask (batch, keys) or None, beside_logit (batch, heads, queries) and beside_value (.., WIDTH),
both or neither; of any strides of batch, head and token. Query i stands at key keys - queries + i, and sees `behind`
keys before it and `ahead` after it, with BLOCKS none beyond the end of its block. HEAD_BLOCK and WIDTH_BLOCK are powers
of two that cover the widths. Scores are multiplied by log2(e), so that weights are powers of two.
"""

import triton
import triton.language as tl

from polysketch.ops.hyper.triton.programs.steps import HIDDEN, LOWEST, mean_of
from polysketch.ops.triton.programs.shared import as_operand, load_rows, store_rows
from polysketch.ops.window.triton.programs.bounds import LOG2_E, UNSEEN, real_keys, seen_of


@triton.jit(do_not_specialize=["queries", "keys", "behind", "ahead", "block"])
def window_forward(
    query,
    key,
    value,
    key_mask,
    beside_logit,
    beside_value,
    output,
    log_mass,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    mask_row,
    logit_batch, logit_head, logit_token,
    beside_batch, beside_head, beside_token,
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

    output (batch, heads, queries, WIDTH) and log_mass (batch, heads, queries), the logarithm to base 2 of the sum of
    weights, UNSEEN where there is none; contiguous.
    """
    tiles = tl.cdiv(queries, ROWS)
    first = tl.program_id(0) % tiles * ROWS
    heads = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = heads // (KEY_HEADS * SHARED), heads % (KEY_HEADS * SHARED)
    places = first + tl.arange(0, ROWS)
    rows, asked = places.to(tl.int64), places < queries
    inner, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH_BLOCK)
    asking = load_rows(query + batch * query_batch + head * query_head, rows, query_token, inner, asked, HEAD)
    of_key = key + batch * key_batch + head // SHARED * key_head
    of_value = value + batch * value_batch + head // SHARED * value_head
    of_mask = None if key_mask is None else key_mask + batch * mask_row

    highest = tl.full((ROWS,), LOWEST, tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    numerator = tl.zeros((ROWS, WIDTH_BLOCK), tl.float32)
    if beside_logit is not None:
        of_logit = beside_logit + batch * logit_batch + head * logit_head
        logit = tl.load(of_logit + rows * logit_token, mask=asked, other=0.0).to(tl.float32)
        of_beside = beside_value + batch * beside_batch + head * beside_head
        beside = load_rows(of_beside, rows, beside_token, columns, asked, WIDTH).to(tl.float32)
        logit *= LOG2_E
        there = logit != float("-inf")
        highest = tl.where(there, logit, LOWEST)
        mass = tl.where(there, 1.0, 0.0)
        numerator = tl.where(there[:, None], beside, 0.0)

    earlier = keys - queries
    oldest, newest = seen_of(places, earlier, behind, ahead, block, BLOCKS)
    end = tl.minimum(tl.minimum(first + ROWS, queries) + earlier + ahead, keys)
    for start in tl.range(tl.maximum(first + earlier - behind, 0), end, KEYS):
        tokens, real = real_keys(of_mask, start, end, KEYS)
        near = load_rows(of_key, tokens.to(tl.int64), key_token, inner, real, HEAD)
        values = load_rows(of_value, tokens.to(tl.int64), value_token, columns, real, WIDTH)
        scores = tl.dot(asking, tl.trans(near), input_precision=PRECISION) * (scale * LOG2_E)
        seen = real[None, :] & (tokens[None, :] >= oldest[:, None]) & (tokens[None, :] <= newest[:, None])
        scores = tl.where(seen, scores, HIDDEN)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        carried = tl.exp2(highest - higher)
        mass = mass * carried + tl.sum(weights, 1)
        weighing = as_operand(weights, DOT, PRECISION)
        numerator = tl.dot(weighing, values.to(DOT), numerator * carried[:, None], input_precision=PRECISION)
        highest = higher

    line = heads * queries + rows
    store_rows(output, mean_of(numerator, mass), line, columns, asked, WIDTH)
    none = mass == 0.0
    tl.store(log_mass + line, tl.where(none, UNSEEN, highest + tl.log2(tl.where(none, 1.0, mass))), asked)
