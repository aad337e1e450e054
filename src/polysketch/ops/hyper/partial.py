"""Softmax attention to a part of the keys, with the log of its sum of weights, and joining such parts."""

from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.hyper.operators import attend_part

_LARGEST = 30.0  # log of how many times the denominator a sum of samples may be in the numerator: its square is finite


class Partial(NamedTuple):
    """Attention to some of the keys.

    Attributes:
        output: (..., n, value_dim), the weighted mean of those keys' values; zeros where none is seen.
        log_sum: (..., n), the log of the sum of their weights exp(scale * q . k); -inf where none is seen.
    """

    output: Tensor
    log_sum: Tensor


def merge(first: Partial, second: Partial, mass: Tensor | None = None) -> Partial:
    """Attention to the keys of both; gradients go through the shares of the mass, too.

    Args:
        first: some keys.
        second: others.
        mass: (..., n), the log of what `second` adds to the denominator; its own sum of weights when None. Where that
            is not its own, weighted values of more than e^30 times the joint denominator are scaled down to this, so
            that float32 holds them and their gradients.
    """
    added = second.log_sum if mass is None else mass
    blind = (first.log_sum == -torch.inf) & (added == -torch.inf)
    one, other, added = (x.masked_fill(blind, 0.0) for x in (first.log_sum, second.log_sum, added))
    log_sum = torch.logaddexp(one, added)
    one, other = (each - log_sum for each in (one, other))
    other = other if mass is None else other.clamp(max=_LARGEST)
    output = one.exp().unsqueeze(-1) * first.output + other.exp().unsqueeze(-1) * second.output
    return Partial(output, log_sum.masked_fill(blind, -torch.inf))


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Partial:
    """Attention of tiles of queries, each to keys of its own or all to the same keys.

    Args:
        query: (..., tiles, rows, head_dim) in float32 or float64.
        key: (..., tiles, keys, head_dim), or (..., 1, keys, head_dim) for all tiles.
        value: (..., tiles or 1, keys, value_dim); without a width where only the sum of weights is wanted.
        bias: (..., tiles, keys), added to the scores of every row of a tile, -inf to hide a key; no gradient.
        scale: factor on q . k.
    """
    shape = query.shape[:-1]
    leads = 1 if key.shape[-3] == query.shape[-3] else shape[:-2].numel()  # tiles with keys of their own are one list
    query, key, value = (x.reshape(leads, x.shape[:-2].numel() // leads, *x.shape[-2:]) for x in (query, key, value))
    bias = bias.reshape(leads, -1, bias.shape[-1])
    output, log_sum = attend_part(query, key, value, bias, False, scale)
    return Partial(output.view(*shape, value.shape[-1]), log_sum.view(shape))


def attend_causally(query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scale: float) -> Partial:
    """Causal attention inside each of many blocks.

    Args:
        query: (blocks, groups, n, head_dim): `groups` query heads share a key head.
        key: (blocks, n, head_dim).
        value: (blocks, n, value_dim).
        real: (blocks, n) bool, False for keys that nobody sees; None when all are seen.
        scale: factor on q . k.
    """
    bias = None if real is None else torch.zeros_like(real, dtype=query.dtype).masked_fill(~real, -torch.inf)
    bias = None if bias is None else bias.unsqueeze(1)
    return Partial(*attend_part(query, key.unsqueeze(1), value.unsqueeze(1), bias, True, scale))
