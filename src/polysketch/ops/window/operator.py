"""The backends of programs as one `torch.library` operator: shapes for tracing, gradients, operation counts."""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import custom_op, nothing_looks_on, refuse_tangents
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.ops.window import native
from polysketch.ops.window.triton import launcher
from polysketch.ops.window.types import Inputs, Plan, computed_in

# What `Inputs` and `Plan` are to PyTorch, in their order.
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? beside_logit, Tensor? beside_value, "
    "SymInt behind, SymInt ahead, float scale, SymInt block, str backend"
)
_TENSORS = len(Inputs._fields)
_PROGRAMS = {"native": native, "triton": launcher}


def attend(inputs: Inputs, plan: Plan) -> Tensor:
    """The native backend's output, differentiable once in all inputs but the mask."""
    beside = (x if x is None else x.to(inputs.query.dtype) for x in inputs[4:])
    inputs = Inputs(*inputs[:4], *beside)
    if nothing_looks_on(*inputs):  # an operator's call takes as long as a hundred tokens
        refuse_tangents("window_attention", *inputs)
        return native.forward(inputs, plan)[0].to(inputs.query.dtype)
    return window_attention_operator(*inputs, *plan, "native")[0]


def attend_by_triton(inputs: Inputs, plan: Plan) -> Tensor:
    """The triton backend's output, as `attend`; under autocast in its dtype, as PyTorch's attention has it."""
    query, key, value = (x.to(computed_in(x)) for x in inputs[:3])
    return window_attention_operator(query, key, value, *inputs[3:], *plan, "triton")[0]


def _unpacked(arguments: Any) -> tuple[Inputs, Plan, Any]:
    """What is given, and who computes."""
    inputs, (*options, backend) = Inputs(*arguments[:_TENSORS]), arguments[_TENSORS:]
    return inputs, Plan(*options), _PROGRAMS[backend]


@custom_op("polysketch::window_attention", f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
def window_attention_operator(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The programs' forward: output, and what they keep of each query for their backward, in float32."""
    inputs, plan, programs = _unpacked(arguments)
    with without_autocast(inputs.query.device.type):
        output, *kept = programs.forward(inputs, plan)
        return output.to(inputs.query.dtype), *kept


@window_attention_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, _, programs = _unpacked(arguments)
    output, *kept = programs.empty(inputs.query, inputs.value.shape[3])
    return output.to(inputs.query.dtype), *kept


@custom_op("polysketch::window_attention_backward", f"(Tensor gradient, Tensor[] outputs, {_ARGUMENTS}) -> Tensor[]")
def window_attention_backward_operator(gradient: Tensor, outputs: list[Tensor], *arguments: Any) -> list[Tensor]:
    """The programs' backward: gradients of query, key, value and, if given, of the key beside."""
    inputs, plan, programs = _unpacked(arguments)
    with without_autocast(inputs.query.device.type):
        found = programs.backward(inputs, plan, (outputs[0], outputs[1], outputs[2]), gradient)
        return [of_x.to(x.dtype) for of_x, x in zip(found, _differentiable(inputs), strict=True)]


@window_attention_backward_operator.register_fake
def _(gradient: Tensor, outputs: list[Tensor], *arguments: Any) -> list[Tensor]:
    inputs, *_ = _unpacked(arguments)
    return [x.new_empty(x.shape) for x in _differentiable(inputs)]


def _differentiable(inputs: Inputs) -> list[Tensor]:
    return [x for x in (*inputs[:3], *inputs[4:]) if x is not None]


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.options = inputs[_TENSORS:]


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes them at each look
    inputs, outputs = saved[:_TENSORS], list(saved[_TENSORS:])
    found = window_attention_backward_operator(gradient, outputs, *inputs, *ctx.options)
    beside = found[3:] or (None, None)
    return (*found[:3], None, *beside, *(None for _ in ctx.options))


window_attention_operator.register_autograd(_backward, setup_context=_setup_context)


def _operations(shapes: Inputs, plan: Plan) -> int:
    """Floating-point operations of the forward pass over pairs that are seen, multiply-adds counted as two."""
    batch, heads, queries, width = shapes.query
    earlier = shapes.key[2] - queries
    before, after = plan.behind - earlier, plan.ahead
    beyond = _triangle(before) - _triangle(before - queries)
    if not plan.block:
        beyond += _triangle(after) - _triangle(after - queries)
    else:  # of each place in a block, as many as follow it there
        whole, rest = divmod(queries, plan.block)
        counts = (whole, plan.block), (1, rest)
        beyond += queries * after - sum(n * sum(min(after, i) for i in range(size)) for n, size in counts)
    pairs = queries * (plan.behind + plan.ahead + 1) - beyond
    return 2 * batch * heads * pairs * (width + shapes.value[3])


def _triangle(count: int) -> int:
    """1 + 2 + ... + count."""
    return count * (count + 1) // 2 if count > 0 else 0


@counts_operations_of(torch.ops.polysketch.window_attention)
def _forward_operations(*shapes: Any, **_: Any) -> int:
    return _operations(*_unpacked(shapes)[:2])


@counts_operations_of(torch.ops.polysketch.window_attention_backward)
def _backward_operations(gradient: Any, outputs: Any, *shapes: Any, **_: Any) -> int:
    return _operations(*_unpacked(shapes)[:2]) * 5 // 2
