"""Attention with the log of its sums by plain products, in pieces: the definition, and for what nothing fused fits.

Nothing of the size queries x keys is kept for the backward pass: it computes the weights again.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CPU_ENTRIES = 2**19  # of the score matrix worked on at once: what a core's cache holds
_ENTRIES = 2**27  # elsewhere
_ROWS = 128  # queries worked on together in causal attention


class PlainAttention(torch.autograd.Function):
    """(output, log_sum) of query (leads, tiles, rows, head_dim), key and value (leads, tiles or 1, keys, width).

    The bias (leads, tiles, keys) or None is added to the scores, and has no gradient.
    """

    @staticmethod
    def forward(ctx, query, key, value, bias, scale):
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        log_sum = query.new_empty(query.shape[:3])
        for lead, tiles, shared in _pieces(query, key):
            added = None if bias is None else bias[lead, tiles, None]
            weights = _product(query[lead, tiles] * scale, key[lead, shared].mT)
            _softmax_(weights, added, log_sum[lead, tiles])
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
            added = None if bias is None else bias[lead, tiles, None]
            scaled, grad = query[lead, tiles] * ctx.scale, grad_output[lead, tiles]
            weights = _weights_again(_product(scaled, key[lead, shared].mT), added, log_sum[lead, tiles])
            _add_product(grad_value[lead, shared], weights, grad)
            grad_scores = _product(grad, value[lead, shared].mT)
            grad_scores += (grad_log_sum[lead, tiles] - (grad * output[lead, tiles]).sum(-1))[..., None]
            grad_scores *= weights
            grad_query[lead, tiles] = _product(grad_scores, key[lead, shared]) * ctx.scale
            _add_product(grad_key[lead, shared], grad_scores, scaled)
        return grad_query, grad_key, grad_value, None, None


class PlainCausalAttention(torch.autograd.Function):
    """(output, log_sum) of query (blocks, groups, n, head_dim), key and value (blocks, n, width), each block by itself.

    The bias (blocks, n) or None is added to the scores, and has no gradient.
    """

    @staticmethod
    def forward(ctx, query, key, value, bias, scale):
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        log_sum = query.new_empty(query.shape[:3])
        for blocks, rows, seen in _causal_pieces(query):
            sums = query.new_empty(log_sum[blocks, :, rows].flatten(1).shape)
            weights = _causal_scores(query, key, blocks, rows, seen, scale)
            _softmax_(weights, None if bias is None else bias[blocks, None, seen], sums)
            output[blocks, :, rows] = (weights @ value[blocks, seen]).view_as(output[blocks, :, rows])
            log_sum[blocks, :, rows] = sums.view_as(log_sum[blocks, :, rows])
        ctx.save_for_backward(query, key, value, bias, output, log_sum)
        ctx.scale = scale
        return output, log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_log_sum):
        query, key, value, bias, output, log_sum = ctx.saved_tensors
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        offset = grad_log_sum - (grad_output * output).sum(-1)
        for blocks, rows, seen in _causal_pieces(query):
            scores = _causal_scores(query, key, blocks, rows, seen, ctx.scale)
            added = None if bias is None else bias[blocks, None, seen]
            weights = _weights_again(scores, added, log_sum[blocks, :, rows].flatten(1))
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
