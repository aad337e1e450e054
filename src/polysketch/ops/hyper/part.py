"""Softmax attention to a part of the keys, with the log of its sum of weights, and joining such parts.

The part is one operator of PyTorch with its gradient, for compiled graphs too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.custom_op import custom_op
from polysketch.ops.hyper import cpu_kernel, products
from polysketch.ops.operation_counts import counts_operations_of

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
    key, value = (x.flatten(0, -3) for x in (key, value))  # tiles with keys of their own are groups by themselves
    tiles = shape[:-1].numel() // max(1, len(key))
    query, bias = query.reshape(-1, tiles, *query.shape[-2:]), bias.reshape(-1, tiles, bias.shape[-1])
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
    return Partial(*attend_part(query, key, value, bias, True, scale))


@custom_op("polysketch::attend_part")
def attend_part(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention and the log of its sums of weights.

    Args:
        query: (groups, tiles, rows, head_dim).
        key: (groups, keys, head_dim), shared by the tiles of a group.
        value: (groups, keys, value_dim); without a width where only the log sum is wanted.
        bias: (groups, tiles or 1, keys), added to the scores of every row of a tile; no gradient.
        causal: row i sees keys up to i; then rows are as many as keys.
        scale: factor on q . k.

    Returns:
        (groups, tiles, rows, value_dim), zeros where all is hidden, and (groups, tiles, rows), -inf there.
    """
    program = cpu_kernel if cpu_kernel.fits(query, value, bias, causal) else products
    return program.attend(query, key, value, bias, causal, scale)


@custom_op("polysketch::attend_part_backward")
def attend_part_backward(
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
    """Gradients of query, key and value; the weights are computed again."""
    program = cpu_kernel if cpu_kernel.fits(query, value, bias, causal) else products
    return program.attend_backward(grad_output, grad_log_sum, query, key, value, bias, output, log_sum, causal, scale)


@attend_part.register_fake
def _(query, key, value, bias, causal, scale):
    return query.new_empty(*query.shape[:3], value.shape[2]), query.new_empty(query.shape[:3])


@attend_part_backward.register_fake
def _(grad_output, grad_log_sum, query, key, value, bias, output, log_sum, causal, scale):
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _save(ctx, inputs, output):
    query, key, value, bias, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, bias, *output)


def _differentiate(ctx, grad_output, grad_log_sum):
    grads = attend_part_backward(grad_output, grad_log_sum, *ctx.saved_tensors, ctx.causal, ctx.scale)
    return *grads, None, None, None


attend_part.register_autograd(_differentiate, setup_context=_save)


def _products(query: list[int], value: list[int], keys: int, causal: bool) -> int:
    """Multiplications and additions of one product of queries and keys and one of weights and values."""
    pairs = query[0] * query[1] * query[2] * keys
    return 2 * pairs * (query[3] + value[2]) // (2 if causal else 1)


@counts_operations_of(torch.ops.polysketch.attend_part)
def _forward_flops(query, key, value, bias, causal, scale, *, out_shape=None) -> int:
    return _products(query, value, key[1], causal)


@counts_operations_of(torch.ops.polysketch.attend_part_backward)
def _backward_flops(
    grad_output, grad_log_sum, query, key, value, bias, output, log_sum, causal, scale, *, out_shape=None
) -> int:
    return _products(query, value, key[1], causal) * 5 // 2
