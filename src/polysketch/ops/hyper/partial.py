"""Softmax attention to a part of the keys, with the log of its sum of weights, and joining such parts."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CPU_ENTRIES = 2**19  # of the score matrix worked on at once: what a core's cache holds
_ENTRIES = 2**27  # elsewhere
_ROWS = 128  # queries worked on together in causal attention


class Partial(NamedTuple):
    """Attention to some of the keys.

    Attributes:
        output: (..., n, value_dim), the weighted mean of those keys' values; zeros where none is seen.
        log_sum: (..., n), the log of the sum of their weights exp(scale * q . k); -inf where none is seen.
    """

    output: Tensor
    log_sum: Tensor


def merge(first: Partial, second: Partial) -> Partial:
    """Attention to the keys of both; gradients go through the shares of the mass, too."""
    blind = (first.log_sum == -torch.inf) & (second.log_sum == -torch.inf)
    one, other = first.log_sum.masked_fill(blind, 0.0), second.log_sum.masked_fill(blind, 0.0)
    log_sum = torch.logaddexp(one, other)
    shares = ((each - log_sum).exp().unsqueeze(-1) for each in (one, other))
    output = sum(share * part.output for share, part in zip(shares, (first, second), strict=True))
    return Partial(output, log_sum.masked_fill(blind, -torch.inf))


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Partial:
    """Attention of tiles of queries, each to keys of its own or all to the same keys.

    Nothing of the size queries x keys is kept for the backward pass: it computes the weights again.

    Args:
        query: (..., tiles, rows, head_dim) in float32 or float64.
        key: (..., tiles, keys, head_dim), or (..., 1, keys, head_dim) for all tiles.
        value: (..., tiles or 1, keys, value_dim).
        bias: (..., tiles, keys), added to the scores of every row of a tile, -inf to hide a key; no gradient.
        scale: factor on q . k.
    """
    lead = query.shape[:-3]
    if key.shape[-3] == query.shape[-3]:
        query, key, value = (x.reshape(1, -1, *x.shape[-2:]) for x in (query, key, value))
        bias = None if bias is None else bias.reshape(1, -1, bias.shape[-1])
    else:
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        bias = None if bias is None else bias.reshape(-1, *bias.shape[-2:])
    output, log_sum = _Attend.apply(query, key, value, bias, scale)
    tiles = query.shape[0] * query.shape[1] // max(1, lead.numel())
    return Partial(output.view(*lead, tiles, *output.shape[2:]), log_sum.view(*lead, tiles, log_sum.shape[2]))


def attend_causally(query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scale: float) -> Partial:
    """Causal attention inside each of many blocks.

    Args:
        query: (blocks, groups, n, head_dim): `groups` query heads share a key head.
        key: (blocks, n, head_dim).
        value: (blocks, n, value_dim).
        real: (blocks, n) bool, False for keys that nobody sees; None when all are seen.
        scale: factor on q . k.
    """
    hidden = None if real is None else torch.zeros_like(real, dtype=query.dtype).masked_fill(~real, -torch.inf)
    return Partial(*_AttendCausally.apply(query, key, value, hidden, scale))


class _Attend(torch.autograd.Function):
    """`attend` on (leads, tiles, rows, head_dim); a piece is some tiles of one lead."""

    @staticmethod
    def forward(ctx, query, key, value, bias, scale):
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        log_sum = query.new_empty(query.shape[:3])
        for lead, tiles, shared in _pieces(query, key):
            hidden = None if bias is None else bias[lead, tiles, None]
            weights = _product(query[lead, tiles] * scale, key[lead, shared].mT)
            _softmax_(weights, hidden, log_sum[lead, tiles])
            output[lead, tiles] = _product(weights, value[lead, shared])
        ctx.save_for_backward(query, key, value, bias, output, log_sum)
        ctx.scale = scale
        return output, log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_log_sum):
        query, key, value, bias, output, log_sum = ctx.saved_tensors
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for lead, tiles, shared in _pieces(query, key):
            hidden = None if bias is None else bias[lead, tiles, None]
            scaled, grad = query[lead, tiles] * ctx.scale, grad_output[lead, tiles]
            weights = _weights_again(_product(scaled, key[lead, shared].mT), hidden, log_sum[lead, tiles])
            _add_product(grad_value[lead, shared], weights, grad)
            grad_scores = _product(grad, value[lead, shared].mT)
            grad_scores += (grad_log_sum[lead, tiles] - (grad * output[lead, tiles]).sum(-1))[..., None]
            grad_scores *= weights
            grad_query[lead, tiles] = _product(grad_scores, key[lead, shared]) * ctx.scale
            _add_product(grad_key[lead, shared], grad_scores, scaled)
        return grad_query, grad_key, grad_value, None, None


class _AttendCausally(torch.autograd.Function):
    """`attend_causally`, `_ROWS` rows at a time over the keys that those rows see."""

    @staticmethod
    def forward(ctx, query, key, value, hidden, scale):
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        log_sum = query.new_empty(query.shape[:3])
        for blocks, rows, seen in _causal_pieces(query):
            sums = query.new_empty(log_sum[blocks, :, rows].flatten(1).shape)
            weights = _causal_scores(query, key, blocks, rows, seen, scale)
            _softmax_(weights, None if hidden is None else hidden[blocks, None, seen], sums)
            output[blocks, :, rows] = (weights @ value[blocks, seen]).view_as(output[blocks, :, rows])
            log_sum[blocks, :, rows] = sums.view_as(log_sum[blocks, :, rows])
        ctx.save_for_backward(query, key, value, hidden, output, log_sum)
        ctx.scale = scale
        return output, log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_log_sum):
        query, key, value, hidden, output, log_sum = ctx.saved_tensors
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        offset = grad_log_sum - (grad_output * output).sum(-1)
        for blocks, rows, seen in _causal_pieces(query):
            scores = _causal_scores(query, key, blocks, rows, seen, ctx.scale)
            bias = None if hidden is None else hidden[blocks, None, seen]
            weights = _weights_again(scores, bias, log_sum[blocks, :, rows].flatten(1))
            grad = grad_output[blocks, :, rows].flatten(1, 2)
            grad_value[blocks, seen].baddbmm_(weights.mT, grad)
            grad_scores = grad @ value[blocks, seen].mT
            grad_scores += offset[blocks, :, rows].flatten(1)[..., None]
            grad_scores *= weights
            scaled = query[blocks, :, rows].flatten(1, 2) * ctx.scale
            grad_query[blocks, :, rows] = (grad_scores @ key[blocks, seen]).view_as(grad_query[blocks, :, rows])
            grad_key[blocks, seen].baddbmm_(grad_scores.mT, scaled)
        return grad_query.mul_(ctx.scale), grad_key, grad_value, None, None


def _pieces(query: Tensor, key: Tensor) -> list[tuple[int, slice, slice]]:
    """(lead, tiles, tiles of its keys), each of a bounded number of scores."""
    leads, tiles, rows, _ = query.shape
    size = max(1, _entries(query) // (rows * key.shape[2]))
    own = key.shape[1] == tiles
    return [
        (lead, slice(start, start + size), slice(start, start + size) if own else slice(0, 1))
        for lead in range(leads)
        for start in range(0, tiles, size)
    ]


def _causal_pieces(query: Tensor) -> list[tuple[slice, slice, slice]]:
    """(blocks, rows, the keys that those see), each of a bounded number of scores."""
    count, groups, length, _ = query.shape
    pieces = []
    for start in range(0, length, _ROWS):
        end = min(start + _ROWS, length)
        size = max(1, _entries(query) // (groups * _ROWS * end))
        pieces += [(slice(i, i + size), slice(start, end), slice(0, end)) for i in range(0, count, size)]
    return pieces


def _entries(like: Tensor) -> int:
    return _CPU_ENTRIES if like.device.type == "cpu" else _ENTRIES


def _causal_scores(query: Tensor, key: Tensor, blocks: slice, rows: slice, seen: slice, scale: float) -> Tensor:
    """(blocks, groups * rows, keys seen), -inf for the keys after a row."""
    queries = query[blocks, :, rows]
    scores = (queries.flatten(1, 2) * scale) @ key[blocks, seen].mT
    later = torch.ones(queries.shape[2], queries.shape[2], dtype=torch.bool, device=query.device).triu(1)
    scores.unflatten(1, queries.shape[1:3])[..., rows].masked_fill_(later, -torch.inf)
    return scores


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Tile by tile, or every tile with the only one on the right: one product then."""
    if right.shape[0] == left.shape[0]:
        return left @ right
    return (left.flatten(0, 1) @ right[0]).unflatten(0, left.shape[:2])


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left^T right, tile by tile, or summed over the tiles where `into` is one for all."""
    if into.shape[0] == left.shape[0]:
        into.baddbmm_(left.mT, right)
    else:
        into[0].addmm_(left.flatten(0, 1).mT, right.flatten(0, 1))


def _softmax_(scores: Tensor, bias: Tensor | None, log_sum: Tensor) -> None:
    """Turn scores into weights that sum to 1 in each row, or all 0 where every one is hidden, and fill in log_sum."""
    if bias is not None:
        scores += bias
    # A row that sees nothing has the maximum -inf, from which nothing can be subtracted.
    maximum = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    total = scores.sub_(maximum).exp_().sum(-1, keepdim=True)
    log_sum.copy_((maximum + total.log())[..., 0])
    scores.div_(total.masked_fill_(total == 0, 1.0))


def _weights_again(scores: Tensor, bias: Tensor | None, log_sum: Tensor) -> Tensor:
    """The weights that `_softmax_` gave, from the scores and the log sums."""
    if bias is not None:
        scores += bias
    return scores.sub_(log_sum.masked_fill(log_sum == -torch.inf, 0.0)[..., None]).exp_()
