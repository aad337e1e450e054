"""Attention of queries to a set of keys that they all may see: chunks of sorted keys exactly, the others by samples."""

from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.hyper.given import tiles_by_mask
from polysketch.ops.hyper.partial import Partial, attend, merge
from polysketch.ops.hyper.rows import take_rows
from polysketch.ops.hyper.sampling import SAMPLING
from polysketch.ops.hyper.tiles import Tiles, sort_keys, tiles_by_code, tiles_by_rank


class Options(NamedTuple):
    """What `hyper_attention` was asked for."""

    hyperplanes: Tensor
    chunk_size: int
    sample_size: int
    sampling: str
    seed: int
    scale: float
    heavy: Tensor | None = None


def attend_approximately(
    query: Tensor, key: Tensor, value: Tensor, real: Tensor, start: Tensor, by_rank: bool, options: Options
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

    Returns:
        Partial of (batch, key_heads, nodes, groups, n).
    """
    groups, length = query.shape[-3:-1]
    samples = SAMPLING[options.sampling](value, real, start, options.sample_size, options.seed)
    tiles = _tiles(query, key, real, samples.key, by_rank, options)
    queries = take_rows(query.flatten(-3, -2), tiles.query)
    exact_bias = _hide(tiles.real, query.dtype)
    exact = attend(queries, take_rows(key, tiles.key), take_rows(value, tiles.key), exact_bias, options.scale)
    log_weights = samples.log_weights(tiles.covered, real.sum(-1).unsqueeze(1), tiles.real.sum(-1))
    sampled_key, sampled_value = (take_rows(x, samples.key).unsqueeze(-3) for x in (key, value))
    sampled = attend(queries, sampled_key, sampled_value, log_weights.to(query.dtype), options.scale)
    output, log_sum = merge(exact, sampled)
    output = take_rows(output.flatten(-3, -2), tiles.slot)
    log_sum = log_sum.flatten(-2).gather(-1, tiles.slot)
    return Partial(output.unflatten(-2, (groups, length)), log_sum.unflatten(-1, (groups, length)))


def _tiles(query: Tensor, key: Tensor, real: Tensor, sample: Tensor, by_rank: bool, options: Options) -> Tiles:
    """Where queries meet keys exactly: as the caller says, or as hashes do."""
    if options.heavy is not None:
        return tiles_by_mask(query, real, options.heavy, sample, options.chunk_size)
    keys = sort_keys(key, real, options.hyperplanes, options.chunk_size)
    if by_rank:
        return tiles_by_rank(query, keys, real, options.hyperplanes, sample)
    return tiles_by_code(query, keys, options.hyperplanes, sample)


def _hide(real: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for real keys, -inf for others."""
    return torch.zeros_like(real, dtype=dtype).masked_fill(~real, -torch.inf)
