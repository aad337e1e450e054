"""Attention of tiles of queries to keys of their own: the output, and the gradient of the queries.

A query may be in several tiles, and have seen its own block before: every launch is for tiles that share no query, and
goes on from what the one before has left. So nothing is merged afterwards, no two programs write to one place, and the
same call gives the same bits. Outputs and gradients are float32 in between.

Shapes: query (batch, KEY_HEADS x SHARED, queries, HEAD), key and value (batch, KEY_HEADS, keys of all, HEAD or WIDTH)
of any strides of batch, head and token; query_places (batch, KEY_HEADS, tiles, rows), key_places and log_weights (..,
tiles, keys); output and grad_output (batch, heads, queries, WIDTH), peak, mass and their like without WIDTH, grad_query
with HEAD, contiguous. HEAD_BLOCK and WIDTH_BLOCK are powers of two that cover the widths.
"""

import triton
import triton.language as tl

from polysketch.ops.hyper.triton.programs.steps import LOWEST, asked_for, changes_of, mean_of, see, seen_keys
from polysketch.ops.triton.programs.shared import load_rows, store_rows


@triton.jit(do_not_specialize=["queries", "tiles", "first", "count", "rows", "keys"])
def hyper_tile_forward(
    query,
    key,
    value,
    query_places,
    key_places,
    log_weights,
    output,
    peak,
    mass,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    queries,
    tiles, first, count,
    rows,
    keys,
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
    """One program: a block of rows of one of the tiles first .. first + count - 1."""
    block, tile, both = block_of_tile(tl.cdiv(rows, ROWS), first, count, tiles)
    places, asked = asked_for(query_places + tile * rows, block, rows, ROWS)
    member, token, line = where_they_are(places, both, queries, SHARED)
    batch, head = both // KEY_HEADS, both % KEY_HEADS
    inner, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH_BLOCK)
    from_place = member * query_head + token * query_token
    asking = load_rows(query + batch * query_batch + head * SHARED * query_head, from_place, 1, inner, asked, HEAD)

    highest = tl.load(peak + line, mask=asked, other=LOWEST)
    total = tl.load(mass + line, mask=asked, other=0.0)
    numerator = load_rows(output, line, WIDTH, columns, asked, WIDTH) * total[:, None]
    end = tl.where(tl.sum(asked.to(tl.int32), 0) > 0, keys, 0)
    for start in tl.range(0, end, KEYS):
        tokens, added, seen = seen_keys(key_places + tile * keys, log_weights + tile * keys, start, keys, KEYS)
        near = load_rows(key + batch * key_batch + head * key_head, tokens, key_token, inner, seen, HEAD)
        values = load_rows(value + batch * value_batch + head * value_head, tokens, value_token, columns, seen, WIDTH)
        scores = tl.dot(asking, tl.trans(near), input_precision=PRECISION) * scale + added[None, :]
        highest, total, numerator = see(scores, values, highest, total, numerator, PRECISION, DOT)

    store_rows(output, mean_of(numerator, total), line, columns, asked, WIDTH)
    tl.store(peak + line, highest, asked)
    tl.store(mass + line, total, asked)


@triton.jit(do_not_specialize=["queries", "tiles", "first", "count", "rows", "keys"])
def hyper_tile_grad_query(
    query,
    key,
    value,
    query_places,
    key_places,
    log_weights,
    grad_output,
    peak,
    share,
    mean,
    grad_query,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    queries,
    tiles, first, count,
    rows,
    keys,
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
    """One program: a block of rows of one of the tiles first .. first + count - 1, added to `grad_query`.

    `share` is 1 / mass, zero where a query has seen nothing, and `mean` grad_output . output.
    """
    block, tile, both = block_of_tile(tl.cdiv(rows, ROWS), first, count, tiles)
    places, asked = asked_for(query_places + tile * rows, block, rows, ROWS)
    member, token, line = where_they_are(places, both, queries, SHARED)
    batch, head = both // KEY_HEADS, both % KEY_HEADS
    inner, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH_BLOCK)
    from_place = member * query_head + token * query_token
    asking = load_rows(query + batch * query_batch + head * SHARED * query_head, from_place, 1, inner, asked, HEAD)
    upstream = load_rows(grad_output, line, WIDTH, columns, asked, WIDTH)
    peaks, shares, means = (
        tl.load(peak + line, mask=asked, other=0.0),
        tl.load(share + line, mask=asked, other=0.0),
        tl.load(mean + line, mask=asked, other=0.0),
    )
    total = tl.zeros((ROWS, HEAD_BLOCK), tl.float32)
    end = tl.where(tl.sum(asked.to(tl.int32), 0) > 0, keys, 0)
    for start in tl.range(0, end, KEYS):
        tokens, added, seen = seen_keys(key_places + tile * keys, log_weights + tile * keys, start, keys, KEYS)
        near = load_rows(key + batch * key_batch + head * key_head, tokens, key_token, inner, seen, HEAD)
        values = load_rows(value + batch * value_batch + head * value_head, tokens, value_token, columns, seen, WIDTH)
        scores = tl.dot(asking, tl.trans(near), input_precision=PRECISION) * scale + added[None, :]
        grad_weights = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
        _, changes = changes_of(scores, grad_weights, peaks[:, None], shares[:, None], means[:, None])
        total = tl.dot(changes.to(DOT), near.to(DOT), total, input_precision=PRECISION)

    before = load_rows(grad_query, line, HEAD, inner, asked, HEAD)
    store_rows(grad_query, before + total * scale, line, inner, asked, HEAD)


@triton.jit
def block_of_tile(blocks, first, count, tiles):
    """(this program's block of rows, its tile among those of all heads, batch item and key head as one number)."""
    block = tl.program_id(0) % blocks
    tile = first + tl.program_id(0) // blocks % count
    both = (tl.program_id(0) // blocks // count).to(tl.int64)
    return block, both * tiles + tile, both


@triton.jit
def where_they_are(places, both, queries, SHARED: tl.constexpr):
    """(heads among those of the key head, tokens, rows of a contiguous (batch, heads, queries)) of some places."""
    member, token = (places // queries).to(tl.int64), (places % queries).to(tl.int64)
    return member, token, (both * SHARED + member) * queries + token
