"""The backends of programs as one `torch.library` operator: shapes for tracing, gradients, operation counts."""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import custom_op
from polysketch.ops.hyper import native, triton
from polysketch.ops.hyper.meetings import Meetings
from polysketch.ops.hyper.types import Given
from polysketch.ops.operation_counts import counts_operations_of

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? real, Tensor query_places, Tensor key_places, Tensor log_weights, "
    "SymInt[] parts, int block, float scale, str backend"
)
_TENSORS = 7
_PROGRAMS = {"native": native, "triton": triton}


def _unpacked(arguments: Any) -> tuple[Given, Any]:
    """What is given, and who computes."""
    query, key, value, real, query_places, key_places, log_weights, parts, block, scale, backend = arguments
    met = Meetings(query_places, key_places, log_weights, tuple(parts))
    return Given(query, key, value, real, met, block, scale), _PROGRAMS[backend]


@custom_op("polysketch::hyper_attention", f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
def hyper_attention_operator(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The programs' forward: output, and peak and mass of each query for backward; in float32 for half precision."""
    given, programs = _unpacked(arguments)
    with without_autocast(given.query.device.type):
        return programs.forward(given)


@hyper_attention_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, value = arguments[0], arguments[2]
    rows, dtype = query.shape[:3], torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty((*rows, value.shape[3]), dtype=dtype)
    return output, query.new_empty(rows, dtype=dtype), query.new_empty(rows, dtype=dtype)


@custom_op(
    "polysketch::hyper_attention_backward",
    f"(Tensor gradient, Tensor output, Tensor peak, Tensor mass, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def hyper_attention_backward_operator(
    gradient: Tensor, output: Tensor, peak: Tensor, mass: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The programs' backward: gradients of query, key and value."""
    given, programs = _unpacked(arguments)
    with without_autocast(given.query.device.type):
        return programs.backward(given, (output, peak, mass), gradient)


@hyper_attention_backward_operator.register_fake
def _(gradient, output, peak, mass, *arguments):
    return tuple(x.new_empty(x.shape) for x in arguments[:3])


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.options = inputs[_TENSORS:]


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes them at each look
    given, found = saved[:_TENSORS], saved[_TENSORS:]
    found = hyper_attention_backward_operator(gradient, *found, *given, *ctx.options)
    return (*found, *(None for _ in range(_TENSORS - 3 + len(ctx.options))))


hyper_attention_operator.register_autograd(_backward, setup_context=_setup_context)


def _operations(arguments: Any) -> int:
    """Of products of queries with keys and of weights with values; a multiply-add as two. Every slot counts."""
    query, key, value, _, query_places, key_places, _, _, block, *_ = arguments
    batch, heads, length, width = query
    whole, rest = divmod(length, block) if block else (0, 0)
    exact = batch * heads * (whole * block * (block + 1) + rest * (rest + 1)) // 2
    tiles = batch * key[1] * query_places[2] * query_places[3] * key_places[3]
    return 2 * (exact + tiles) * (width + value[3])


@counts_operations_of(torch.ops.polysketch.hyper_attention)
def _forward_operations(*shapes: Any, **_: Any) -> int:
    return _operations(shapes)


@counts_operations_of(torch.ops.polysketch.hyper_attention_backward)
def _backward_operations(gradient: Any, output: Any, peak: Any, mass: Any, *shapes: Any, **_: Any) -> int:
    return _operations(shapes) * 5 // 2
