"""Attention to many keys: to chunks of sorted keys exactly, to the others by samples; causal by halves.

Causal attention goes by halves whose places are fixed (algorithm 4), so that later tokens move no earlier row.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.hyper.capping import (
    Capping,
    bounded_mass,
    draw_rows,
    draw_rows_in_order,
    log_largest_rest,
    log_share,
)
from polysketch.ops.hyper.exact_keys import Tiles, mask_of_second_halves, take_rows, tiles_by_mask
from polysketch.ops.hyper.meetings import Meetings, Places, joined, meetings
from polysketch.ops.hyper.part import Partial, attend, attend_causally, merge
from polysketch.ops.hyper.samples import Samples, draw_by_norm, draw_uniform
from polysketch.ops.hyper.sort_lsh import sort_keys, tiles_by_code, tiles_by_rank


class Options(NamedTuple):
    """What `hyper_attention` was asked for."""

    hyperplanes: Tensor
    chunk_size: int
    sample_size: int
    sampling: str
    seed: int
    scale: float
    heavy: Tensor | None = None  # (batch or 1, heads or 1, nodes, query chunks, key chunks); no nodes in the op's
    capping: Capping | None = None


def attend_by_halves(
    query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, min_length: int, options: Options
) -> Partial:
    """Exact inside blocks of `min_length` tokens, then for spans of 1, 2, 4, ... blocks the second half to the first.

    Args:
        query: (batch, key_heads, groups, n, head_dim).
        key: (batch, key_heads, n, head_dim).
        value: (batch, key_heads, n, value_dim).
        real: (batch, n) bool, False for keys that nobody sees; None when all are seen.
        min_length: tokens of a block.
        options: of the op.

    Returns:
        Partial of (batch, key_heads, groups, n).
    """
    result = _inside_blocks(query, key, value, real, min_length, options.scale)
    seen = torch.ones(1, key.shape[2], dtype=torch.bool, device=key.device) if real is None else real
    half = min_length
    while half < key.shape[2]:
        result = _with_first_halves(result, query, key, value, seen, half, options)
        half *= 2
    return result


def _inside_blocks(query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, block: int, scale: float) -> Partial:
    """Exact causal attention inside aligned blocks, the last of which may be shorter."""
    batch, heads, _, length, _ = query.shape
    parts = []
    for span, size in _spans(length, block):
        queries, keys, values = (x[..., span, :].unflatten(-2, (-1, size)) for x in (query, key, value))
        mask = None if real is None else real[:, None, span].expand(-1, heads, -1).reshape(-1, size)
        part = attend_causally(
            queries.movedim(3, 2).flatten(0, 2), keys.flatten(0, 2), values.flatten(0, 2), mask, scale
        )
        blocks = (batch, heads, -1)
        output = part.output.unflatten(0, blocks).movedim(2, 3).flatten(3, 4)
        parts.append(Partial(output, part.log_sum.unflatten(0, blocks).movedim(2, 3).flatten(3, 4)))
    return _joined(parts)


class Crossing(NamedTuple):
    """The second halves of spans of one size, which attend to the first halves.

    Attributes:
        tokens: of all these spans, one after another.
        size: tokens of a span.
        half: tokens of its first half.
        query: (batch, key_heads, nodes, groups, size - half, head_dim), of the second halves.
        real: (batch or 1, nodes, size) bool, of both halves.
        start: (nodes,) int64, the first token of each span.
        options: of the op, with what it says of these halves.
    """

    tokens: slice
    size: int
    half: int
    query: Tensor
    real: Tensor
    start: Tensor
    options: Options

    def of_keys(self, x: Tensor) -> Tensor:
        """The first halves, (batch, key_heads, nodes, half, width), of (batch, key_heads, n, width)."""
        return x[..., self.tokens, :].unflatten(-2, (-1, self.size))[..., : self.half, :]


def crossings(query: Tensor, real: Tensor, half: int, options: Options) -> Iterator[Crossing]:
    """Spans of 2 * half tokens whose second half has seen the first one: whole ones, and one at the end."""
    for span, size in _spans(query.shape[3], 2 * half):
        if size > half:
            queries = query[..., span, :].unflatten(-2, (-1, size))[..., half:, :].movedim(3, 2)
            of_spans = real[:, span].unflatten(1, (-1, size))
            start = span.start + size * torch.arange(of_spans.shape[1], device=query.device)
            yield Crossing(span, size, half, queries, of_spans, start, _inside_spans(options, span, size, half))


def _with_first_halves(
    result: Partial, query: Tensor, key: Tensor, value: Tensor, real: Tensor, half: int, options: Options
) -> Partial:
    """`result`, in which the second half of each span of 2 * half tokens has seen the first half, too."""
    parts, end = [], 0
    for crossing in crossings(query, real, half, options):
        span, size = crossing.tokens, crossing.size
        seen = attend_approximately(
            crossing.query,
            crossing.of_keys(key),
            crossing.of_keys(value),
            crossing.real[..., :half],
            start=crossing.start,
            by_rank=False,
            options=crossing.options,
            later=crossing.real[..., half:],
        )
        before = (result.output[:, :, :, span], result.log_sum[:, :, :, span])
        halves = [x.unflatten(3, (-1, size)).tensor_split([half], dim=4) for x in before]
        after = merge(Partial(halves[0][1], halves[1][1]), Partial(*(x.movedim(2, 3) for x in seen)))
        both = zip(halves, after, strict=True)
        parts.append(Partial(*(torch.cat([first, second], 4).flatten(3, 4) for (first, _), second in both)))
        end = span.stop
    if end < query.shape[3]:  # a first half without a second one
        parts.append(Partial(result.output[:, :, :, end:], result.log_sum[:, :, :, end:]))
    return _joined(parts)


def _inside_spans(options: Options, span: slice, size: int, half: int) -> Options:
    """The options of the second halves of spans of `size` tokens to the first: with their part of a given mask."""
    if options.heavy is None:
        return options
    chunk = options.chunk_size
    nodes, chunks = (span.stop - span.start) // size, -(-size // chunk)
    return options._replace(
        heavy=mask_of_second_halves(options.heavy, span.start // chunk, nodes, chunks, half // chunk)
    )


def _spans(length: int, size: int) -> Iterator[tuple[slice, int]]:
    """The tokens in whole spans of `size`, and then those of the rest; with the size of a span in each."""
    whole = length // size * size
    if whole:
        yield slice(0, whole), size
    if whole < length:
        yield slice(whole, length), length - whole


def _joined(parts: list[Partial]) -> Partial:
    """Parts that follow one another along the tokens."""
    return parts[0] if len(parts) == 1 else Partial(*(torch.cat(tensors, 3) for tensors in zip(*parts, strict=True)))


def attend_approximately(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor,
    start: Tensor,
    by_rank: bool,
    options: Options,
    later: Tensor | None = None,
) -> Partial:
    """Attention without a causal mask, of many nodes at once.

    Args:
        query: (batch, key_heads, nodes, groups, n, head_dim).
        key: (batch, key_heads, nodes, m, head_dim).
        value: (batch, key_heads, nodes, m, value_dim).
        real: (batch or 1, nodes, m) bool, False for keys that nobody sees.
        start: (nodes,) int64, the position of each node's first key.
        by_rank: queries are of the same tokens as keys, and are sorted among themselves.
        options: of the op.
        later: (batch or 1, nodes, n) bool, the real ones among queries that come after all of the keys, none of which
            may depend on one that comes after it; None where any may.

    Returns:
        Partial of (batch, key_heads, nodes, groups, n).
    """
    groups, length = query.shape[-3:-1]
    tiles = _tiles(query, key, real, by_rank, options)
    queries = take_rows(query.flatten(-3, -2), tiles.query)
    exact_bias = _hide(tiles.real, query.dtype)
    exact = attend(queries, take_rows(key, tiles.key), take_rows(value, tiles.key), exact_bias, options.scale)
    counted = draw_uniform(key, real, start, options.sample_size, options.seed)
    key_count = real.sum(-1).unsqueeze(1)
    sampled_key, log_weights = _sampled_keys(key, counted, tiles, key_count)
    if options.sampling == "uniform":
        sampled = attend(queries, sampled_key, _sampled(value, counted), log_weights, options.scale)
        mass = sampled.log_sum
    else:
        drawn = draw_by_norm(value, real, start, options.sample_size, options.seed, counted)
        drawn_key, drawn_weights = _sampled_keys(key, drawn, tiles, key_count)
        sampled = attend(queries, drawn_key, _sampled(value, drawn), drawn_weights, options.scale)
        mass = None
    if options.capping is not None:
        bounds = _bounds(query, key, real, start, by_rank, later, tiles, options, options.capping)
        mass = bounded_mass(exact.log_sum, queries, sampled_key, log_weights, *bounds)
    elif mass is None:  # of values without a width, only the sum of weights is computed
        mass = attend(queries, sampled_key, sampled_key[..., :0], log_weights, options.scale).log_sum
    output, log_sum = merge(exact, sampled, mass)
    output = take_rows(output.flatten(-3, -2), tiles.slot)
    log_sum = log_sum.flatten(-2).gather(-1, tiles.slot)
    return Partial(output.unflatten(-2, (groups, length)), log_sum.unflatten(-1, (groups, length)))


def meetings_by_halves(query: Tensor, key: Tensor, real: Tensor, min_length: int, options: Options) -> Meetings:
    """What queries see beyond their own blocks of `min_length` tokens, in every span.

    Arguments as of `attend_by_halves`, but `real` is given: (batch or 1, n) bool.
    """
    halves: list[int] = []  # a list: torch.compile of PyTorch 2.9 does not know takewhile
    while min_length << len(halves) < key.shape[2]:
        halves.append(min_length << len(halves))
    found = (crossing for half in halves for crossing in crossings(query, real, half, options))
    return joined(_meetings_of(crossing, key, query.shape[3]) for crossing in found)


def _meetings_of(crossing: Crossing, key: Tensor, length: int) -> Meetings:
    places = Places(crossing.start + crossing.half, crossing.start, length)
    real = crossing.real[..., : crossing.half]
    return meetings_of_nodes(crossing.query, crossing.of_keys(key), real, places, False, crossing.options)


def meetings_of_nodes(
    query: Tensor, key: Tensor, real: Tensor, places: Places, by_rank: bool, options: Options
) -> Meetings:
    """Which keys the queries of each node see, and what each counts; arguments as `attend_approximately`."""
    tiles = _tiles(query, key, real, by_rank, options)
    samples = draw_uniform(key, real, places.key, options.sample_size, options.seed)
    dtype = torch.promote_types(key.dtype, torch.float32)
    return meetings(tiles, samples, real.sum(-1).unsqueeze(1), query.shape[-2], places, dtype)


def _sampled_keys(key: Tensor, samples: Samples, tiles: Tiles, key_count: Tensor) -> tuple[Tensor, Tensor]:
    """The drawn keys (leads, 1, m, head_dim), and the log of what each counts for a tile (leads, tiles, m)."""
    log_weights = samples.log_weights(tiles.covers(samples.key), key_count, tiles.real.sum(-1))
    return _sampled(key, samples), log_weights.to(key.dtype)


def _sampled(source: Tensor, samples: Samples) -> Tensor:
    """Rows of the drawn keys, (leads, 1, m, width)."""
    return take_rows(source, samples.key).unsqueeze(-3)


def _tiles(query: Tensor, key: Tensor, real: Tensor, by_rank: bool, options: Options) -> Tiles:
    """Where queries meet keys exactly: as the caller says, or as hashes do."""
    if options.heavy is not None:
        return tiles_by_mask(query, real, options.heavy, options.chunk_size)
    keys = sort_keys(key, real, options.hyperplanes, options.chunk_size)
    if by_rank:
        return tiles_by_rank(query, keys, real, options.hyperplanes)
    return tiles_by_code(query, keys, options.hyperplanes)


def _bounds(
    query: Tensor,
    key: Tensor,
    real: Tensor,
    start: Tensor,
    by_rank: bool,
    later: Tensor | None,
    tiles: Tiles,
    options: Options,
    capping: Capping,
) -> tuple[Tensor, Tensor, float]:
    """What `bounded_mass` takes last: log(tau / kappa) of each row of a tile, the log of the caps' share, the scale."""
    sizes = (options.sample_size, options.seed)
    if later is None:
        asked = real if by_rank else real.new_ones(1, *query.shape[2:5:2])
        rows = draw_rows(query, asked, start, *sizes)
    else:
        rows = draw_rows_in_order(key, later, start + key.shape[-2], *sizes)
    log_tau = log_largest_rest(query, key, real, tiles, rows, options.scale)
    log_floor = log_tau.flatten(-2).gather(-1, tiles.query.flatten(-2)).view_as(tiles.query)
    key_count = real.sum(-1).unsqueeze(1)
    # Where no key is left out, there is nothing to estimate.
    complete = (tiles.real.sum(-1) == key_count.unsqueeze(-1)).unsqueeze(-1)
    log_floor = (log_floor - math.log(capping.kappa)).masked_fill(complete, -torch.inf)
    return log_floor, log_share(key_count, options.sample_size, capping.epsilon).to(query.dtype), options.scale


def _hide(real: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for real keys, -inf for others."""
    return torch.zeros_like(real, dtype=dtype).masked_fill(~real, -torch.inf)
