"""Exact causal attention inside blocks of tokens: the first part of a causal call, and the gradients through it.

Shapes: query (batch, KEY_HEADS x SHARED, length, HEAD), key and value (batch, KEY_HEADS, length, HEAD or WIDTH) of any
strides of batch, head and token, `real` (batch, length) or None; output and grad_output (batch, heads, length, WIDTH),
peak, mass and their like without WIDTH, gradients like their inputs, contiguous and in float32. HEAD_BLOCK and
WIDTH_BLOCK are powers of two that cover the widths. Sums over other keys than the block's may be in peak and mass.
"""

import triton
import triton.language as tl

from polysketch.ops.hyper.triton.programs.steps import HIDDEN, LOWEST, changes_of, mean_of, see
from polysketch.ops.triton.programs.shared import load_rows, store_rows


@triton.jit(do_not_specialize=["length", "block"])
def hyper_block_forward(
    query,
    key,
    value,
    real,
    output,
    peak,
    mass,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    length,
    block,
    scale,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One program: some rows of one query head, all of one block, the longest first."""
    begin, first, limit, heads = piece_of_block(length, block, ROWS, True)
    batch, head = heads // (KEY_HEADS * SHARED), heads % (KEY_HEADS * SHARED)
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    asked = rows < limit
    inner, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH_BLOCK)
    asking = load_rows(query + batch * query_batch + head * query_head, rows, query_token, inner, asked, HEAD)
    of_real = None if real is None else real + batch * length

    highest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    numerator = tl.zeros((ROWS, WIDTH_BLOCK), tl.float32)
    end = tl.where(first < limit, tl.minimum(first + ROWS, limit), begin)
    for start in tl.range(begin, end, KEYS):
        tokens, seen = keys_of_block(of_real, start, limit, KEYS)
        near = load_rows(key + batch * key_batch + head // SHARED * key_head, tokens, key_token, inner, seen, HEAD)
        of_value = value + batch * value_batch + head // SHARED * value_head
        values = load_rows(of_value, tokens, value_token, columns, seen, WIDTH)
        scores = tl.dot(asking, tl.trans(near), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :] & (rows[:, None] >= tokens[None, :]), scores, HIDDEN)
        highest, total, numerator = see(scores, values, highest, total, numerator, PRECISION, DOT)

    line = heads * length + rows
    store_rows(output, mean_of(numerator, total), line, columns, asked, WIDTH)
    tl.store(peak + line, highest, asked)
    tl.store(mass + line, total, asked)


@triton.jit(do_not_specialize=["length", "block"])
def hyper_block_grad_query(
    query,
    key,
    value,
    real,
    grad_output,
    peak,
    share,
    mean,
    grad_query,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    length,
    block,
    scale,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One program: some rows of one query head, all of one block, the longest first.

    `share` is 1 / mass, zero where a query has seen nothing, and `mean` grad_output . output.
    """
    begin, first, limit, heads = piece_of_block(length, block, ROWS, True)
    batch, head = heads // (KEY_HEADS * SHARED), heads % (KEY_HEADS * SHARED)
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    asked, line = rows < limit, heads * length + rows
    inner, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH_BLOCK)
    asking = load_rows(query + batch * query_batch + head * query_head, rows, query_token, inner, asked, HEAD)
    upstream = load_rows(grad_output, line, WIDTH, columns, asked, WIDTH)
    peaks = tl.load(peak + line, mask=asked, other=0.0)
    shares = tl.load(share + line, mask=asked, other=0.0)
    means = tl.load(mean + line, mask=asked, other=0.0)
    of_real = None if real is None else real + batch * length

    total = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
    end = tl.where(first < limit, tl.minimum(first + ROWS, limit), begin)
    for start in tl.range(begin, end, KEYS):
        tokens, seen = keys_of_block(of_real, start, limit, KEYS)
        near = load_rows(key + batch * key_batch + head // SHARED * key_head, tokens, key_token, inner, seen, HEAD)
        of_value = value + batch * value_batch + head // SHARED * value_head
        values = load_rows(of_value, tokens, value_token, columns, seen, WIDTH)
        scores = tl.dot(asking, tl.trans(near), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :] & (rows[:, None] >= tokens[None, :]), scores, HIDDEN)
        grad_weights = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
        _, changes = changes_of(scores, grad_weights, peaks[:, None], shares[:, None], means[:, None])
        total = tl.dot(changes.to(DOT), near.to(DOT), total, input_precision=PRECISION)
    store_rows(grad_query, total * scale, line, inner, asked, HEAD)


@triton.jit(do_not_specialize=["length", "block"])
def hyper_block_grad_key_value(
    query,
    key,
    value,
    real,
    grad_output,
    peak,
    share,
    mean,
    grad_key,
    grad_value,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    length,
    block,
    scale,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One program: some keys of one head, all of one block, and all rows of the block that see any of them."""
    _, first, limit, heads = piece_of_block(length, block, KEYS, False)
    batch, head = heads // KEY_HEADS, heads % KEY_HEADS
    of_real = None if real is None else real + batch * length
    tokens, seen = keys_of_block(of_real, first, limit, KEYS)
    inner, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH_BLOCK)
    near = load_rows(key + batch * key_batch + head * key_head, tokens, key_token, inner, seen, HEAD)
    values = load_rows(value + batch * value_batch + head * value_head, tokens, value_token, columns, seen, WIDTH)

    total_key = tl.zeros((KEYS, HEAD_BLOCK), tl.float32)
    total_value = tl.zeros((KEYS, WIDTH_BLOCK), tl.float32)
    pieces = tl.cdiv(tl.maximum(limit - first, 0), ROWS)
    for item in tl.range(0, SHARED * pieces):
        member, piece = item // pieces, item % pieces
        rows = (first + piece * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        asked, line = rows < limit, (heads * SHARED + member) * length + rows
        of_query = query + batch * query_batch + (head * SHARED + member) * query_head
        asking = load_rows(of_query, rows, query_token, inner, asked, HEAD)
        upstream = load_rows(grad_output, line, WIDTH, columns, asked, WIDTH)
        peaks = tl.load(peak + line, mask=asked, other=0.0)
        shares = tl.load(share + line, mask=asked, other=0.0)
        means = tl.load(mean + line, mask=asked, other=0.0)
        scores = tl.dot(near, tl.trans(asking), input_precision=PRECISION) * scale
        scores = tl.where(seen[:, None] & (rows[None, :] >= tokens[:, None]), scores, HIDDEN)
        grad_weights = tl.dot(values, tl.trans(upstream), input_precision=PRECISION)
        weights, changes = changes_of(scores, grad_weights, peaks[None, :], shares[None, :], means[None, :])
        total_value = tl.dot(weights.to(DOT), upstream.to(DOT), total_value, input_precision=PRECISION)
        total_key = tl.dot(changes.to(DOT), asking.to(DOT), total_key, input_precision=PRECISION)

    line, inside = heads * length + tokens, tokens < limit
    store_rows(grad_key, total_key * scale, line, inner, inside, HEAD)
    store_rows(grad_value, total_value, line, columns, inside, WIDTH)


@triton.jit
def piece_of_block(length, block, SIZE: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(its block's first token, this program's first, the block's end, head and batch item as one number)."""
    pieces = tl.cdiv(block, SIZE)
    piece = tl.program_id(0) % pieces
    if LAST_FIRST:
        piece = pieces - 1 - piece
    blocks = tl.cdiv(length, block)
    begin = tl.program_id(0) // pieces % blocks * block
    heads = (tl.program_id(0) // pieces // blocks).to(tl.int64)
    return begin, begin + piece * SIZE, tl.minimum(begin + block, length), heads


@triton.jit
def keys_of_block(real, start, limit, KEYS: tl.constexpr):
    """(tokens from `start` on, whether they are real keys before `limit`)."""
    tokens = (start + tl.arange(0, KEYS)).to(tl.int64)
    seen = tokens < limit
    if real is not None:
        seen = seen & (tl.load(real + tokens, mask=seen, other=0) != 0)
    return tokens, seen
