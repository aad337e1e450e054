"""The correction as `torch.library` operators: a few pairs of tiles at a time, recomputed in the backward pass.

On a CPU every thread takes key heads of its own: split over the cores, each of the many small operations takes longer.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import custom_op
from polysketch.ops.heavy.candidates import sort_keys, windows
from polysketch.ops.heavy.tile_pairs import KEYS, QUERIES, Pairs, make_pairs, pairs_at_most
from polysketch.ops.linear.state import state_dtype
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.ops.parallel import deal, num_workers, run_in_parallel
from polysketch.ops.polynomial.blockwise import odd_power, power_

_PAIRS_AT_ONCE = 32  # their weights, two tensors of 512 kB, stay in a core's cache
_QUERIES_WORTH_A_THREAD = 512  # of all heads: waking another thread for fewer costs more


class Leads(NamedTuple):
    """What each key head of each row of the batch, a lead, is given, with the queries of all heads that share it.

    Attributes:
        query, query_features: (leads, queries of a lead, width).
        key, key_features, value: (leads, keys, width).
        query_codes, key_codes: (leads, queries of a lead), (leads, keys).
        before, after: (leads, queries of a lead); `after` may be None.
    """

    query: Tensor
    query_features: Tensor
    key: Tensor
    key_features: Tensor
    value: Tensor
    query_codes: Tensor
    key_codes: Tensor
    before: Tensor
    after: Tensor | None

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...], codes: tuple[Tensor, Tensor], edges: tuple[Tensor, Tensor | None]) -> Self:
        """From tensors of rows, queries first, codes and edges as the operators get them."""
        batch, key_heads = codes[1].shape[:2]
        leads, group = batch * key_heads, codes[0].shape[1] // key_heads
        by_lead = [x.reshape(leads, x.shape[1] // key_heads * x.shape[2], *x.shape[3:]) for x in (*tensors, *codes)]
        spread = [
            None if edge is None else edge[:, None, None].expand(-1, key_heads, group, -1).reshape(by_lead[5].shape)
            for edge in edges
        ]
        return cls(*by_lead, *spread)

    def some(self, leads: slice) -> "Leads":
        """Some of them."""
        return Leads(*(None if x is None else x[leads] for x in self))  # type: ignore[arg-type]

    @property
    def rows(self) -> "Rows":
        """Without the leads."""
        return Rows(*(x.flatten(0, 1) for x in self[:5] if x is not None))


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
    inputs = (query, query_features, key, key_features, value)
    leads = Leads.of(inputs, (query_codes, key_codes), (before, after))
    output = query.new_zeros(*leads.query.shape[:2], value.shape[3], dtype=state_dtype(value.dtype))

    def correct(some: slice) -> None:
        own, found = leads.some(some), output[some].flatten(0, 1)
        rows = own.rows
        for part in _parts(own, size):
            tiles = _read(rows, part, output.dtype)
            _add(found, part.queries, _weights(tiles, part.hidden, degree) @ tiles.value)

    _each(leads, correct)
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
    leads = Leads.of(inputs, (query_codes, key_codes), (before, after))
    upstream = gradient.reshape(*leads.query.shape[:2], gradient.shape[3])
    totals = [torch.zeros(x.shape, dtype=upstream.dtype, device=x.device) for x in leads[:5] if x is not None]

    def add_gradients(some: slice) -> None:
        own, given = leads.some(some), upstream[some].flatten(0, 1)
        rows, found = own.rows, Rows(*(total[some].flatten(0, 1) for total in totals))
        for part in _parts(own, size):
            _add_gradients(found, _read(rows, part, upstream.dtype), _take(given, part.queries), part, degree)

    _each(leads, add_gradients)
    found = Rows(*(total.view(x.shape).to(x.dtype) for total, x in zip(totals, inputs, strict=True)))
    return [found.query, found.key, found.query_features, found.key_features, found.value]


def _each(leads: Leads, work: Callable[[slice], None]) -> None:
    """`work` on all leads, every thread on some that follow one another."""
    count, queries = leads.query.shape[:2]
    if not count:
        return
    device = leads.query.device
    threads = min(num_workers(device), count * queries // _QUERIES_WORTH_A_THREAD)
    with without_autocast(device.type):
        run_in_parallel(lambda share: work(slice(share[0], share[-1] + 1)), deal(range(count), threads))


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


def _parts(leads: Leads, size: int) -> Iterator[Part]:
    """All pairs of the candidates before one index and, where given, behind another."""
    keys = sort_keys(leads.key_codes)
    for edges, behind in ((leads.before, False), (leads.after, True)):
        if edges is None:
            continue
        cut = windows(leads.query_codes, keys, edges, size, behind=behind)
        pairs = make_pairs(cut, size, count=edges.device.type == "cpu")
        for start in range(0, len(pairs.tile), _PAIRS_AT_ONCE):
            yield _part(pairs, cut.key_rows, slice(start, start + _PAIRS_AT_ONCE))


def _part(pairs: Pairs, key_rows: Tensor, some: slice) -> Part:
    tile, behind = pairs.tile[some], pairs.behind[some, None]
    rank = pairs.first[some, None] + torch.arange(KEYS, device=tile.device)
    # A rank behind the span may be anybody's key: its number is not read, for there zero times it might be NaN.
    keys = key_rows[rank.minimum(behind - 1)]
    lower, upper = pairs.lower[tile, :, None], pairs.upper[tile, :, None]
    return Part(pairs.query_rows[tile], keys, (rank[:, None] < lower) | (rank[:, None] >= upper))


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
