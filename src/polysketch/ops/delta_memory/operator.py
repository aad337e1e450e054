"""The native `delta_memory` as `torch.library` operators: shapes for tracing, gradients, operation counts."""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.custom_op import custom_op
from polysketch.ops.delta_memory import native
from polysketch.ops.delta_memory.types import Inputs
from polysketch.ops.operation_counts import counts_operations_of

_ARGUMENTS = ", ".join(f"Tensor {name}" for name in Inputs._fields) + ", int size"
_DIFFERENTIABLE = ("query_weights", "key_weights", "value", "strength")


def recall(inputs: Inputs, size: int) -> Tensor:
    """What every query recalls of an empty memory, differentiable once in weights, value and strength."""
    return delta_memory_operator(*inputs, size)[0]


@custom_op("polysketch::delta_memory", f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def delta_memory_operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    """What every query recalls; and, for the backward pass, what every token writes."""
    *tensors, size = arguments
    return native.recall(Inputs(*tensors), size)


@delta_memory_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, value = arguments[0], arguments[4]
    return value.new_empty(*query.shape[:3], value.shape[3]), value.new_empty(value.shape)


@custom_op("polysketch::delta_memory_backward", f"(Tensor gradient, Tensor written, {_ARGUMENTS}) -> Tensor[]")
def delta_memory_backward_operator(gradient: Tensor, written: Tensor, *arguments: Any) -> list[Tensor]:
    """Gradients of the weights of queries and keys, of values and of strengths."""
    *tensors, size = arguments
    return native.gradients(Inputs(*tensors), size, written, gradient)


@delta_memory_backward_operator.register_fake
def _(gradient: Tensor, written: Tensor, *arguments: Any) -> list[Tensor]:
    inputs = Inputs(*arguments[:-1])
    return [x.new_empty(x.shape) for x in (getattr(inputs, name) for name in _DIFFERENTIABLE)]


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:-1])
    ctx.size = inputs[-1]


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    written, *inputs = ctx.saved_tensors
    gradients = delta_memory_backward_operator(gradient, written, *inputs, ctx.size)
    found = dict(zip(_DIFFERENTIABLE, gradients, strict=True))
    return (*(found.get(name) for name in Inputs._fields), None)


delta_memory_operator.register_autograd(_backward, setup_context=_setup_context)


def _operations(query: Any, key: Any, value: Any) -> int:
    """Floating-point operations of the forward pass, multiply-adds counted as two."""
    batch, heads, length, twice_kept = query
    return 2 * batch * length * (heads + 2 * key[1]) * (twice_kept // 2) ** 2 * value[3]


@counts_operations_of(torch.ops.polysketch.delta_memory)
def _forward_operations(query_cells: Any, _: Any, key_cells: Any, __: Any, value: Any, *rest: Any, **___: Any) -> int:
    return _operations(query_cells, key_cells, value)


@counts_operations_of(torch.ops.polysketch.delta_memory_backward)
def _backward_operations(_: Any, __: Any, query_cells: Any, ___: Any, key_cells: Any, *rest: Any, **____: Any) -> int:
    return 3 * _operations(query_cells, key_cells, rest[1])
