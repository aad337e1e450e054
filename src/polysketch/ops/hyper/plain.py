"""Attention with the log of its sums by plain products, in pieces: the definition, and for what nothing fused fits.

Nothing of the size queries x keys is kept for the backward pass: it computes the weights again.
"""

import torch
from torch import Tensor

_CPU_ENTRIES = 2**19  # of the score matrix worked on at once: what a core's cache holds
_ENTRIES = 2**27  # elsewhere
_ROWS = 128  # queries worked on together in causal attention


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log sum of `attend_part` without `causal`."""
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    log_sum = query.new_empty(query.shape[:3])
    for lead, tiles, shared in _pieces(query, key):
        weights = _product(query[lead, tiles] * scale, key[lead, shared].mT)
        _softmax_(weights, None if bias is None else bias[lead, tiles, None], log_sum[lead, tiles])
        output[lead, tiles] = _product(weights, value[lead, shared])
    return output, log_sum


def plain_attention_backward(
    grad_output: Tensor,
    grad_log_sum: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    log_sum: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, without `causal`."""
    grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    offset = grad_log_sum - (grad_output * output).sum(-1)
    for lead, tiles, shared in _pieces(query, key):
        scaled, grad = query[lead, tiles] * scale, grad_output[lead, tiles]
        added = None if bias is None else bias[lead, tiles, None]
        weights = _weights_again(_product(scaled, key[lead, shared].mT), added, log_sum[lead, tiles])
        _add_product(grad_value[lead, shared], weights, grad)
        grad_scores = _product(grad, value[lead, shared].mT)
        grad_scores += offset[lead, tiles, :, None]
        grad_scores *= weights
        grad_query[lead, tiles] = _product(grad_scores, key[lead, shared])
        _add_product(grad_key[lead, shared], grad_scores, scaled)
    return grad_query.mul_(scale), grad_key, grad_value


def plain_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log sum of `attend_part` with `causal`, `_ROWS` rows at a time over the keys that those rows see."""
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    log_sum = query.new_empty(query.shape[:3])
    for leads, rows, seen in _causal_pieces(query):
        sums = query.new_empty(log_sum[leads, :, rows].flatten(1).shape)
        weights = _causal_scores(query, key, leads, rows, seen, scale)
        _softmax_(weights, None if bias is None else bias[leads, :, seen], sums)
        output[leads, :, rows] = (weights @ value[leads, 0, seen]).view_as(output[leads, :, rows])
        log_sum[leads, :, rows] = sums.view_as(log_sum[leads, :, rows])
    return output, log_sum


def plain_causal_attention_backward(
    grad_output: Tensor,
    grad_log_sum: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    log_sum: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, with `causal`."""
    grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    offset = grad_log_sum - (grad_output * output).sum(-1)
    for leads, rows, seen in _causal_pieces(query):
        scores = _causal_scores(query, key, leads, rows, seen, scale)
        added = None if bias is None else bias[leads, :, seen]
        weights = _weights_again(scores, added, log_sum[leads, :, rows].flatten(1))
        grad = grad_output[leads, :, rows].flatten(1, 2)
        grad_value[leads, 0, seen].baddbmm_(weights.mT, grad)
        grad_scores = grad @ value[leads, 0, seen].mT
        grad_scores += offset[leads, :, rows].flatten(1)[..., None]
        grad_scores *= weights
        scaled = query[leads, :, rows].flatten(1, 2) * scale
        grad_query[leads, :, rows] = (grad_scores @ key[leads, 0, seen]).view_as(grad_query[leads, :, rows])
        grad_key[leads, 0, seen].baddbmm_(grad_scores.mT, scaled)
    return grad_query.mul_(scale), grad_key, grad_value


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
    """(leads, rows, the keys that those see), each of a bounded number of scores."""
    count, tiles, length, _ = query.shape
    pieces = []
    for start in range(0, length, _ROWS):
        end = min(start + _ROWS, length)
        size = max(1, _entries(query) // (tiles * _ROWS * end))
        pieces += [(slice(i, i + size), slice(start, end), slice(0, end)) for i in range(0, count, size)]
    return pieces


def _entries(like: Tensor) -> int:
    return _CPU_ENTRIES if like.device.type == "cpu" else _ENTRIES


def _causal_scores(query: Tensor, key: Tensor, leads: slice, rows: slice, seen: slice, scale: float) -> Tensor:
    """(leads, tiles * rows, keys seen), -inf for the keys after a row."""
    queries = query[leads, :, rows]
    scores = (queries.flatten(1, 2) * scale) @ key[leads, 0, seen].mT
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
