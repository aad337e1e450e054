"""The correction as `torch.library` operators: a few pairs of tiles at a time, recomputed in the backward pass."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.custom_op import custom_op
from polysketch.ops.heavy.candidates import sort_keys, windows
from polysketch.ops.heavy.tile_pairs import KEYS, QUERIES, Pairs, make_pairs, pairs_at_most
from polysketch.ops.linear.state import state_dtype
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.ops.polynomial.blockwise import odd_power, power_

_PAIRS_AT_ONCE = 32  # their weights, two tensors of 512 kB, stay in a core's cache


class Rows(NamedTuple):
    """Tensors without their heads and batches: (all rows of a kind, width).

    Attributes:
        query, query_features: rows of queries, sorted by lead.
        key, key_features, value: rows of keys.
    """

    query: Tensor
    query_features: Tensor
    key: Tensor
    key_features: Tensor
    value: Tensor


class Part(NamedTuple):
    """Some of the pairs.

    Attributes:
        queries: (pairs, QUERIES) int64 rows of queries.
        keys: (pairs, KEYS) int64 rows of keys.
        hidden: (pairs, QUERIES, KEYS) bool, true where the key is no candidate of the query.
    """

    queries: Tensor
    keys: Tensor
    hidden: Tensor


@custom_op("polysketch::heavy_correction")
def heavy_correction_operator(
    query: Tensor,
    key: Tensor,
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    before: Tensor,
    after: Tensor | None,
    degree: int,
    size: int,
) -> Tensor:
    """Sums over candidates of ((q . k)^degree - (phi(q) . phi(k))^2) v, in the dtype of sums."""
    rows = _rows(query, query_features, key, key_features, value)
    output = rows.query.new_zeros(len(rows.query), value.shape[3], dtype=state_dtype(value.dtype))
    with torch.autocast(query.device.type, enabled=False):
        for part in _parts(query_codes, key_codes, before, after, size):
            tiles = _read(rows, part, output.dtype)
            _add(output, part.queries, _weights(tiles, part.hidden, degree) @ tiles.value)
    return output.view(*query.shape[:3], value.shape[3])


@custom_op("polysketch::heavy_correction_backward")
def heavy_correction_backward_operator(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    before: Tensor,
    after: Tensor | None,
    degree: int,
    size: int,
) -> list[Tensor]:
    """Gradients of query, key, query_features, key_features and value."""
    inputs = (query, query_features, key, key_features, value)
    rows, upstream = _rows(*inputs), gradient.reshape(-1, gradient.shape[3])
    totals = Rows(*(torch.zeros_like(x, dtype=upstream.dtype) for x in rows))
    with torch.autocast(query.device.type, enabled=False):
        for part in _parts(query_codes, key_codes, before, after, size):
            _add_gradients(totals, _read(rows, part, upstream.dtype), _take(upstream, part.queries), part, degree)
    found = Rows(*(total.view(x.shape).to(x.dtype) for total, x in zip(totals, inputs, strict=True)))
    return [found.query, found.key, found.query_features, found.key_features, found.value]


def _weights(tiles: Rows, hidden: Tensor, degree: int) -> Tensor:
    """Exact weights less sketched ones, (pairs, QUERIES, KEYS)."""
    weights = power_(tiles.query @ tiles.key.mT, degree)
    sketched = (tiles.query_features @ tiles.key_features.mT).square_()
    return weights.sub_(sketched).masked_fill_(hidden, 0.0)


def _add_gradients(totals: Rows, tiles: Rows, upstream: Tensor, part: Part, degree: int) -> None:
    """Add what these pairs give: d weight = upstream . v, d (q . k) = degree (q . k)^(degree - 1) d weight."""
    scores, sketched = tiles.query @ tiles.key.mT, tiles.query_features @ tiles.key_features.mT
    slope = odd_power(scores, degree - 1, out=torch.empty_like(scores))
    weights = (scores * slope).sub_(sketched.square()).masked_fill_(part.hidden, 0.0)
    _add(totals.value, part.keys, weights.mT @ upstream)
    by_weight = (upstream @ tiles.value.mT).masked_fill_(part.hidden, 0.0)
    by_score, by_sketched = slope.mul_(by_weight).mul_(degree), sketched.mul_(by_weight).mul_(-2)
    _add(totals.query, part.queries, by_score @ tiles.key)
    _add(totals.key, part.keys, by_score.mT @ tiles.query)
    _add(totals.query_features, part.queries, by_sketched @ tiles.key_features)
    _add(totals.key_features, part.keys, by_sketched.mT @ tiles.query_features)


def _parts(query_codes: Tensor, key_codes: Tensor, before: Tensor, after: Tensor | None, size: int) -> Iterator[Part]:
    """All pairs of the candidates before one index and, where given, behind another."""
    key_heads, group = key_codes.shape[1], query_codes.shape[1] // key_codes.shape[1]
    codes = query_codes.reshape(-1, group * query_codes.shape[2])
    keys = sort_keys(key_codes.flatten(0, 1))
    for edge, behind in ((before, False), (after, True)):
        if edge is None:
            continue
        edges = edge[:, None, None].expand(-1, key_heads, group, -1).reshape(codes.shape)
        cut = windows(codes, keys, edges, size, behind=behind)
        pairs = make_pairs(cut, size, count=codes.device.type == "cpu")
        for start in range(0, len(pairs.tile), _PAIRS_AT_ONCE):
            yield _part(pairs, cut.key_rows, slice(start, start + _PAIRS_AT_ONCE))


def _part(pairs: Pairs, key_rows: Tensor, some: slice) -> Part:
    tile, behind = pairs.tile[some], pairs.behind[some, None]
    rank = pairs.first[some, None] + torch.arange(KEYS, device=tile.device)
    # A rank behind the span may be anybody's key: its number is not read, for there zero times it might be NaN.
    keys = key_rows[rank.minimum(behind - 1)]
    lower, upper = pairs.lower[tile, :, None], pairs.upper[tile, :, None]
    return Part(pairs.query_rows[tile], keys, (rank[:, None] < lower) | (rank[:, None] >= upper))


def _rows(*tensors: Tensor) -> Rows:
    return Rows(*(x.reshape(-1, x.shape[3]) for x in tensors))


def _read(rows: Rows, part: Part, dtype: torch.dtype) -> Rows:
    """The rows of both sides of each pair, (pairs, QUERIES or KEYS, width)."""
    return Rows(
        *(_take(x, part.queries).to(dtype) for x in (rows.query, rows.query_features)),
        *(_take(x, part.keys).to(dtype) for x in (rows.key, rows.key_features, rows.value)),
    )


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], by whole rows: indexing goes number by number."""
    return x.index_select(0, rows.flatten()).view(*rows.shape, x.shape[1])


def _add(total: Tensor, rows: Tensor, summands: Tensor) -> None:
    total.index_add_(0, rows.flatten(), summands.flatten(0, 1))


@heavy_correction_operator.register_fake
def _(query, key, query_features, key_features, value, *rest):
    return query.new_empty(*query.shape[:3], value.shape[3], dtype=state_dtype(value.dtype))


@heavy_correction_backward_operator.register_fake
def _(gradient, query, key, query_features, key_features, value, *rest):
    return [x.new_empty(x.shape) for x in (query, key, query_features, key_features, value)]


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:-2])
    ctx.options = inputs[-2:]


def _differentiate(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    gradients = heavy_correction_backward_operator(gradient, *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None, None, None


heavy_correction_operator.register_autograd(_differentiate, setup_context=_setup_context)


def _operations(query, key, query_features, value, after, size: int) -> int:
    """Of the most pairs there can be, multiply-adds counted as two."""
    leads, group = key[0] * key[1], query[1] // key[1]
    pairs = pairs_at_most(leads, group * query[2], key[2], size) * (1 if after is None else 2)
    return 2 * pairs * QUERIES * KEYS * (query[3] + query_features[3] + value[3])


@counts_operations_of(torch.ops.polysketch.heavy_correction)
def _forward_operations(
    query, key, query_features, key_features, value, query_codes, key_codes, before, after, degree, size, **_
):
    return _operations(query, key, query_features, value, after, size)


@counts_operations_of(torch.ops.polysketch.heavy_correction_backward)
def _backward_operations(gradient, query, key, query_features, key_features, value, *rest, **_):
    return 3 * _operations(query, key, query_features, value, rest[3], rest[5])
