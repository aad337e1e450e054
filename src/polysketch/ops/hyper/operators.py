"""Attention with the log of its sums as one operator of PyTorch, with its gradient, for compiled graphs too."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from polysketch.ops.custom_op import custom_op
from polysketch.ops.hyper.fused import can_fuse, fused_attention, fused_attention_backward
from polysketch.ops.hyper.plain import (
    plain_attention,
    plain_attention_backward,
    plain_causal_attention,
    plain_causal_attention_backward,
)


@custom_op("polysketch::attend_part")
def attend_part(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention and the log of its sums of weights.

    Args:
        query: (leads, tiles, rows, head_dim).
        key: (leads, tiles or 1, keys, head_dim), 1 where the tiles of a lead share their keys.
        value: (leads, tiles or 1, keys, value_dim).
        bias: (leads, tiles or 1, keys), added to the scores of every row of a tile; no gradient.
        causal: row i sees keys up to i; then rows are as many as keys, and the tiles share them.
        scale: factor on q . k.

    Returns:
        (leads, tiles, rows, value_dim), zeros where all is hidden, and (leads, tiles, rows), -inf there.
    """
    if can_fuse(query, value, bias, causal):
        return fused_attention(query, key, value, bias, causal, scale)
    return (plain_causal_attention if causal else plain_attention)(query, key, value, bias, scale)


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
    tensors = (grad_output, grad_log_sum, query, key, value, bias, output, log_sum)
    if can_fuse(query, value, bias, causal):
        return fused_attention_backward(*tensors, causal, scale)
    return (plain_causal_attention_backward if causal else plain_attention_backward)(*tensors, scale)


@attend_part.register_fake
def _(query, key, value, bias, causal, scale):
    return query.new_empty(*query.shape[:3], value.shape[3]), query.new_empty(query.shape[:3])


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
    return 2 * pairs * (query[3] + value[3]) // (2 if causal else 1)


@register_flop_formula(torch.ops.polysketch.attend_part)
def _forward_flops(query, key, value, bias, causal, scale, *, out_shape=None) -> int:
    return _products(query, value, key[2], causal)


@register_flop_formula(torch.ops.polysketch.attend_part_backward)
def _backward_flops(
    grad_output, grad_log_sum, query, key, value, bias, output, log_sum, causal, scale, *, out_shape=None
) -> int:
    return _products(query, value, key[2], causal) * 5 // 2
