"""The operator of `part` by plain products, in pieces: its definition, and for what no kernel of PyTorch's fits.

Nothing of the size queries x keys is kept for the backward pass: it computes the weights again.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_CPU_ENTRIES = 2**19  # of the score matrix worked on at once: what a core's cache holds
_ENTRIES = 2**27  # elsewhere
_ROWS = 128  # queries of a tile worked on together in causal attention

_Piece = tuple[slice, slice, slice]  # groups, tiles and rows


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log sum of `attend_part`; arguments as there."""
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    log_sum = query.new_empty(query.shape[:3])
    for piece, keys in _pieces(query, key, causal):
        weights = _scores(query[piece] * scale, key, bias, causal, piece, keys)
        # A row that sees nothing has the maximum -inf, from which nothing can be subtracted.
        maximum = weights.amax(-1, keepdim=True).clamp_(min=torch.finfo(weights.dtype).min)
        total = weights.sub_(maximum).exp_().sum(-1, keepdim=True)
        log_sum[piece] = (maximum + total.log())[..., 0]
        weights.div_(total.masked_fill_(total == 0, 1.0))
        output[piece] = _product(weights, value[piece[0], keys])
    return output, log_sum


def attend_backward(
    grad_output: Tensor,
    grad_log_sum: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    log_sum: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    grad_query, grad_key, grad_value = (
        query.new_empty(query.shape),
        key.new_zeros(key.shape),
        value.new_zeros(value.shape),
    )
    offset = (grad_log_sum - (grad_output * output).sum(-1)).unsqueeze(-1)
    shift = log_sum.masked_fill(log_sum == -torch.inf, 0.0).unsqueeze(-1)
    for piece, keys in _pieces(query, key, causal):
        seen = (piece[0], keys)
        scaled, grad = query[piece] * scale, grad_output[piece]
        weights = _scores(scaled, key, bias, causal, piece, keys).sub_(shift[piece]).exp_()
        grad_value[seen].baddbmm_(weights.flatten(1, 2).mT, grad.flatten(1, 2))
        grad_scores = _product(grad, value[seen].mT).add_(offset[piece]).mul_(weights)
        grad_query[piece] = _product(grad_scores, key[seen])
        grad_key[seen].baddbmm_(grad_scores.flatten(1, 2).mT, scaled.flatten(1, 2))
    return grad_query.mul_(scale), grad_key, grad_value


def _pieces(query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[_Piece, slice]]:
    """Pieces of the queries, each of a bounded number of scores, and the keys that a piece sees."""
    groups, tiles, rows, _ = query.shape
    entries = _CPU_ENTRIES if query.device.type == "cpu" else _ENTRIES
    step = min(_ROWS, rows) if causal else rows
    for start in range(0, rows, max(step, 1)):
        end = min(start + step, rows)
        keys = end if causal else key.shape[1]
        of_tile = max(1, step * keys)
        together = max(1, entries // of_tile)
        if together < tiles and not causal:
            cuts = [(slice(i, i + 1), slice(j, j + together)) for i in range(groups) for j in range(0, tiles, together)]
        else:
            size = max(1, together // tiles)
            cuts = [(slice(i, i + size), slice(0, tiles)) for i in range(0, groups, size)]
        yield from (((group, tile, slice(start, end)), slice(0, keys)) for group, tile in cuts)


def _scores(queries: Tensor, key: Tensor, bias: Tensor | None, causal: bool, piece: _Piece, keys: slice) -> Tensor:
    """(groups, tiles, rows, keys) of a piece, biased; -inf for the keys after a row."""
    scores = _product(queries, key[piece[0], keys].mT)
    if bias is not None:
        scores += bias[piece[0], piece[1], None, keys]
    if causal:
        later = torch.ones(queries.shape[2], queries.shape[2], dtype=torch.bool, device=queries.device).triu(1)
        scores[..., piece[2]].masked_fill_(later, -torch.inf)
    return scores


def _product(left: Tensor, right: Tensor) -> Tensor:
    """(groups, tiles, rows, a) with (groups, a, b): one product for a group."""
    return (left.flatten(1, 2) @ right).unflatten(1, left.shape[1:3])
