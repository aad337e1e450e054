"""The chunked backend as `torch.library` operators: shapes for tracing, gradients, operation counts."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from polysketch.ops.custom_op import custom_op
from polysketch.ops.linear import chunked, chunked_backward, native, triton
from polysketch.ops.linear.plan import Diagonal, Inputs, Outputs, Plan

_TENSORS = len(Inputs._fields)
PROGRAMS = {
    "chunked": (chunked.forward, chunked_backward.backward),
    "native": (native.forward, native.backward),
    "triton": (triton.forward, triton.backward),
}
"""Backends of aligned calls: forward and backward."""


@custom_op("polysketch::linear_attention")
def linear_attention_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    local_query: Tensor | None,
    local_key: Tensor | None,
    log_decay: Tensor | None,
    sums: Tensor | None,
    normalizer: Tensor | None,
    length: Tensor | None,
    power: int,
    causal: bool,
    offset: float,
    normalize: bool,
    degree: int,
    chunk: int,
    diagonal: int,
    return_sums: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A backend's forward on aligned inputs: (output, denominator, sums, normalizer), both last empty unless asked."""
    inputs = Inputs(query, key, value, local_query, local_key, log_decay, sums, normalizer, length)
    plan = _plan((power, causal, offset, normalize, degree, chunk, diagonal, return_sums))
    with torch.autocast(query.device.type, enabled=False):
        output, denominator, final_sums, final_normalizer = PROGRAMS[backend][0](inputs, plan)
    return output, denominator, final_sums, final_normalizer


@linear_attention_operator.register_fake
def _(*arguments):
    return tuple(chunked.empty_outputs(Inputs(*arguments[:_TENSORS]), _plan(arguments[_TENSORS:-1])))


def _plan(options) -> Plan:
    power, causal, offset, normalize, degree, chunk, diagonal, return_sums = options
    return Plan(power, causal, offset, normalize, degree, chunk, Diagonal(diagonal), return_sums)


@custom_op("polysketch::linear_attention_backward")
def linear_attention_backward_operator(
    gradients: list[Tensor],
    outputs: list[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    local_query: Tensor | None,
    local_key: Tensor | None,
    log_decay: Tensor | None,
    sums: Tensor | None,
    normalizer: Tensor | None,
    length: Tensor | None,
    power: int,
    causal: bool,
    offset: float,
    normalize: bool,
    degree: int,
    chunk: int,
    diagonal: int,
    return_sums: bool,
    backend: str,
) -> list[Tensor]:
    """A backend's backward: gradients of query, key, value and, in order, of those optional tensors that are given."""
    inputs = Inputs(query, key, value, local_query, local_key, log_decay, sums, normalizer, length)
    plan = _plan((power, causal, offset, normalize, degree, chunk, diagonal, return_sums))
    with torch.autocast(query.device.type, enabled=False):
        return list(PROGRAMS[backend][1](inputs, plan, Outputs(*outputs), Outputs(*gradients)).values())


@linear_attention_backward_operator.register_fake
def _(gradients, outputs, *arguments):
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _, tensor in _differentiable(arguments)]


def _differentiable(arguments) -> list[tuple[int, Tensor]]:
    """(place, tensor) of the tensors among the operator's arguments that are given and have a gradient."""
    return [(place, arguments[place]) for place in range(_TENSORS - 1) if arguments[place] is not None]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.options = inputs[_TENSORS:]


def _backward(ctx, *gradients):
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes them at each look
    arguments, outputs = saved[:_TENSORS], saved[_TENSORS:]
    results = linear_attention_backward_operator(
        [gradient.contiguous() for gradient in gradients], list(outputs), *arguments, *ctx.options
    )
    by_place = dict(zip((place for place, _ in _differentiable(arguments)), results, strict=True))
    return tuple(by_place.get(place) for place in range(_TENSORS + len(ctx.options)))


linear_attention_operator.register_autograd(_backward, setup_context=_setup_context)


def operations(query_shape, key_shape, value_shape, local_shape, power: int, causal: bool, chunk: int) -> int:
    """Floating-point operations of the forward pass, multiply-adds counted as two; half of a causal chunk."""
    batch, heads, queries, features = query_shape
    keys, width = key_shape[2], value_shape[3] + 1
    expanded = features * (features + 1) // 2 if power == 2 else features
    sums = 2 * expanded * width * batch * (heads * queries + key_shape[1] * keys)
    if not causal:
        return sums
    inner = features if local_shape is None else local_shape[3]
    return sums + batch * heads * queries * min(chunk, keys) * (inner + width)


@register_flop_formula(torch.ops.polysketch.linear_attention)
def _operations(
    query, key, value, local_query, local_key, log_decay, sums, normalizer, length, power, causal, *rest, **_
):
    return operations(query, key, value, local_query, power, causal, rest[3])


@register_flop_formula(torch.ops.polysketch.linear_attention_backward)
def _operations_backward(gradients, outputs, query, key, value, local_query, *rest, **_):
    return 2 * operations(query, key, value, local_query, rest[5], rest[6], rest[10])
