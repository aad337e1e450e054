"""Attention of queries to a set of keys that they all may see: chunks of sorted keys exactly, the others by samples."""

import math
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
from polysketch.ops.hyper.given import tiles_by_mask
from polysketch.ops.hyper.partial import Partial, attend, merge
from polysketch.ops.hyper.rows import take_rows
from polysketch.ops.hyper.sampling import Samples, draw_by_norm, draw_uniform
from polysketch.ops.hyper.tiles import Tiles, sort_keys, tiles_by_code, tiles_by_rank


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
    count = real.sum(-1).unsqueeze(1)
    # Where no key is left out, there is nothing to estimate.
    complete = (tiles.real.sum(-1) == count.unsqueeze(-1)).unsqueeze(-1)
    log_floor = (log_floor - math.log(capping.kappa)).masked_fill(complete, -torch.inf)
    return log_floor, log_share(count, options.sample_size, capping.epsilon).to(query.dtype), options.scale


def _hide(real: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for real keys, -inf for others."""
    return torch.zeros_like(real, dtype=dtype).masked_fill(~real, -torch.inf)
