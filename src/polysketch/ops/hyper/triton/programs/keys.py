"""Gradients of keys and values through tiles, without atomic additions: the same call gives the same bits.

A key may be in many tiles. Tiles that follow one another often have the same keys in the same columns: all tiles of a
span have the same samples, and those of one chunk its keys. `hyper_tile_grad_key_value` adds up what such a run of
tiles says of a block of columns, at one place for each column; `hyper_sum_by_key` adds up those places of every key, in
the order of a list.

Shapes as in `tiles`; `run` (batch, KEY_HEADS, tiles at once, column blocks) is for how many tiles from a tile on a
block of columns is the same, and 0 where another tile's run has it; `part_key` and `part_value` (batch, KEY_HEADS,
tiles at once, keys, HEAD or WIDTH), contiguous float32.
"""

import triton
import triton.language as tl

from polysketch.ops.hyper.triton.programs.steps import added_to_scores, asked_for, changes_of
from polysketch.ops.hyper.triton.programs.tiles import where_they_are
from polysketch.ops.triton.programs.shared import load_rows, store_rows


@triton.jit(do_not_specialize=["queries", "tiles", "first", "count", "rows", "keys"])
def hyper_tile_grad_key_value(
    query,
    key,
    value,
    query_places,
    key_places,
    log_weights,
    run,
    grad_output,
    peak,
    share,
    mean,
    part_key,
    part_value,
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
    """One program: a block of columns of one of the tiles first .. first + count - 1, and of its run.

    Keys are read once for all tiles of the run: where one hides a key, its weight is zero there.
    """
    blocks = tl.cdiv(keys, KEYS)
    start = tl.program_id(0) % blocks * KEYS
    number = tl.program_id(0) // blocks % count
    both = (tl.program_id(0) // blocks // count).to(tl.int64)
    batch, head = both // KEY_HEADS, both % KEY_HEADS
    length = tl.load(run + (both * count + number) * blocks + start // KEYS)
    tile = both * tiles + first + number
    inner, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH_BLOCK)
    within = start + tl.arange(0, KEYS)
    inside = (within < keys) & (length > 0)
    tokens = tl.load(key_places + tile * keys + within, mask=inside, other=0).to(tl.int64)
    near = load_rows(key + batch * key_batch + head * key_head, tokens, key_token, inner, inside, HEAD)
    values = load_rows(value + batch * value_batch + head * value_head, tokens, value_token, columns, inside, WIDTH)

    total_key = tl.zeros((KEYS, HEAD_BLOCK), tl.float32)
    total_value = tl.zeros((KEYS, WIDTH_BLOCK), tl.float32)
    pieces = tl.cdiv(rows, ROWS)
    for item in tl.range(0, length * pieces):
        here = tile + item // pieces
        added, _ = added_to_scores(log_weights + here * keys, within, inside)
        places, asked = asked_for(query_places + here * rows, item % pieces, rows, ROWS)
        member, token, line = where_they_are(places, both, queries, SHARED)
        from_place = member * query_head + token * query_token
        asking = load_rows(query + batch * query_batch + head * SHARED * query_head, from_place, 1, inner, asked, HEAD)
        upstream = load_rows(grad_output, line, WIDTH, columns, asked, WIDTH)
        peaks = tl.load(peak + line, mask=asked, other=0.0)
        shares = tl.load(share + line, mask=asked, other=0.0)
        means = tl.load(mean + line, mask=asked, other=0.0)
        scores = tl.dot(near, tl.trans(asking), input_precision=PRECISION) * scale + added[:, None]
        grad_weights = tl.dot(values, tl.trans(upstream), input_precision=PRECISION)
        weights, changes = changes_of(scores, grad_weights, peaks[None, :], shares[None, :], means[None, :])
        total_value = tl.dot(weights.to(DOT), upstream.to(DOT), total_value, input_precision=PRECISION)
        total_key = tl.dot(changes.to(DOT), asking.to(DOT), total_key, input_precision=PRECISION)

    place = (both * count + number) * keys + within
    store_rows(part_key, total_key * scale, place, inner, inside, HEAD)
    store_rows(part_value, total_value, place, columns, inside, WIDTH)


@triton.jit(do_not_specialize=["length", "places"])
def hyper_sum_by_key(
    part_key,
    part_value,
    order,
    edges,
    grad_key,
    grad_value,
    length,
    places,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: some keys of a head, to whose gradients the sum over their places is added.

    Shapes: order (batch and key heads, places), the places of key 0, then of key 1, and so on; edges (batch and key
    heads, length + 1), where those of each key begin; gradients (batch and key heads, length, HEAD or WIDTH).
    """
    blocks = tl.cdiv(length, TOKENS)
    tokens = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    heads = (tl.program_id(0) // blocks).to(tl.int64)
    inside = tokens < length
    begin = tl.load(edges + heads * (length + 1) + tokens, mask=inside, other=0)
    end = tl.load(edges + heads * (length + 1) + tokens + 1, mask=inside, other=0)
    inner, columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, WIDTH_BLOCK)
    line, touched = heads * length + tokens, end > begin
    total_key = load_rows(grad_key, line, HEAD, inner, touched, HEAD)
    total_value = load_rows(grad_value, line, WIDTH, columns, touched, WIDTH)
    for step in tl.range(0, tl.max(end - begin, 0)):
        listed = begin + step < end
        place = heads * places + tl.load(order + heads * places + begin + step, mask=listed, other=0)
        total_key += load_rows(part_key, place, HEAD, inner, listed, HEAD)
        total_value += load_rows(part_value, place, WIDTH, columns, listed, WIDTH)
    store_rows(grad_key, total_key, line, inner, touched, HEAD)
    store_rows(grad_value, total_value, line, columns, touched, WIDTH)
