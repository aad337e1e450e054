"""The delta rule as a `torch.library` operator: shapes for tracing, gradients, operation counts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import custom_op
from polysketch.ops.delta import chunked, native, triton
from polysketch.ops.delta.types import Inputs
from polysketch.ops.linear import linear_attention_gradients
from polysketch.ops.linear.packing import expanded_size
from polysketch.ops.operation_counts import counts_operations_of


def _runs_anywhere(inputs: Inputs) -> str | None:
    return None


Errors = Callable[[Inputs, int, torch.dtype | None], Tensor]


class Backend(NamedTuple):
    """One way to compute the errors.

    Attributes:
        errors: (inputs, factors, half) -> (batch, heads, length, value_dim), each value less what the sums say of it.
            `half` is the dtype that products may be rounded to; None where they may not.
        errors_in_reverse: the same of tokens in reverse: the last one comes first.
        why_not: why it cannot take tensors like these, None where it can.
    """

    errors: Errors
    errors_in_reverse: Errors
    why_not: Callable[[Inputs], str | None] = _runs_anywhere


def _in_float32(
    errors: Callable[[Inputs, int], Tensor], why_not: Callable[[Inputs], str | None] = _runs_anywhere
) -> Backend:
    """Of a function that reads tokens in order and rounds no product."""

    def in_order(inputs: Inputs, factors: int, half: torch.dtype | None) -> Tensor:
        return errors(inputs, factors)

    def in_reverse(inputs: Inputs, factors: int, half: torch.dtype | None) -> Tensor:
        turned = Inputs(inputs.key.flip(2), inputs.value.flip(2), inputs.strength.flip(2), inputs.sums)
        return errors(turned, factors).flip(2)

    return Backend(in_order, in_reverse, why_not)


BACKENDS = {
    "chunked": _in_float32(chunked.errors),
    "native": _in_float32(native.errors, native.why_not),
    "triton": Backend(triton.errors, triton.errors_in_reverse, triton.why_not),
}

_ARGUMENTS = "Tensor key, Tensor value, Tensor strength, Tensor? sums, int factors, str backend, ScalarType? half"


def writes(inputs: Inputs, factors: int, backend: str, half: torch.dtype | None) -> Tensor:
    """What each token writes, differentiable once in all inputs; `half` as of a backend."""
    return delta_writes_operator(*inputs, factors, backend, half)[0]


@custom_op("polysketch::delta_writes", f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def delta_writes_operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    """What each token writes; and, for the backward pass, its error."""
    *tensors, factors, backend, half = arguments
    inputs = Inputs(*tensors)
    with without_autocast(inputs.value.device.type):
        errors = BACKENDS[backend].errors(inputs, factors, half)
        return errors * inputs.strength[..., None], errors


def attention(query: Tensor, inputs: Inputs, factors: int) -> Tensor:
    """What the sums answer to the queries, by the native backend, from no sums; differentiable once in all inputs."""
    return delta_attention_operator(query, *inputs[:3], factors)[0]


@custom_op(
    "polysketch::delta_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor strength, int factors) -> (Tensor, Tensor)",
)
def delta_attention_operator(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """What the sums answer to the queries; and, for the backward pass, every token's error."""
    *tensors, factors = arguments
    return native.attention(query, Inputs(*tensors), factors)


@delta_attention_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return value.new_empty(*query.shape[:3], value.shape[3]), value.new_empty(value.shape)


@custom_op(
    "polysketch::delta_attention_backward",
    "(Tensor gradient, Tensor errors, Tensor query, Tensor key, Tensor strength, int factors) -> Tensor[]",
)
def delta_attention_backward_operator(gradient: Tensor, errors: Tensor, *arguments: Any) -> list[Tensor]:
    """Gradients of query, key, value and strength."""
    query, key, strength, factors = arguments
    return native.attention_backward(query, key, strength, errors, gradient, factors)


@delta_attention_backward_operator.register_fake
def _(gradient: Tensor, errors: Tensor, query: Tensor, key: Tensor, strength: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (query, key, errors, strength)]


def _setup_attention_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, _, strength, ctx.factors = inputs
    ctx.save_for_backward(output[1], query, key, strength)


def _attention_backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*delta_attention_backward_operator(gradient, *ctx.saved_tensors, ctx.factors), None)


delta_attention_operator.register_autograd(_attention_backward, setup_context=_setup_attention_context)


@delta_writes_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    value = arguments[1]
    return value.new_empty(value.shape), value.new_empty(value.shape)


@custom_op(
    "polysketch::delta_writes_backward", f"(Tensor gradient, Tensor written, Tensor errors, {_ARGUMENTS}) -> Tensor[]"
)
def delta_writes_backward_operator(gradient: Tensor, written: Tensor, errors: Tensor, *arguments: Any) -> list[Tensor]:
    """Gradients of key, value, strength and, if given, of the sums."""
    *tensors, factors, backend, half = arguments
    with without_autocast(gradient.device.type):
        return gradients(Inputs(*tensors), factors, BACKENDS[backend], half, (written, errors), gradient)


def gradients(
    inputs: Inputs,
    factors: int,
    backend: Backend,
    half: torch.dtype | None,
    outputs: tuple[Tensor, Tensor],
    upstream: Tensor,
) -> list[Tensor]:
    """Gradients of key, value, strength and, if given, of the sums.

    With the system (I + diag(s) w) u = diag(s) v and g the gradient of u, y = (I + w^T diag(s))^-1 g is the delta rule
    again, on tokens in reverse. The gradients are diag(s) y of v, the products y . e of s, and -diag(s) y u^T of w,
    which is the backward pass of linear attention from keys to the keys before them.

    Args:
        inputs, factors, backend, half: of the forward call.
        outputs: u and e, the writes and the errors that it gave.
        upstream: g.
    """
    written, errors = outputs
    of_errors = backend.errors_in_reverse(Inputs(inputs.key, upstream, inputs.strength), factors, half)
    of_value = of_errors * inputs.strength[..., None]
    operands = [inputs.key, _late(inputs.key), _late(written), -of_value]
    if half is not None:
        operands = [x.to(half) for x in operands]
        if inputs.sums is None:
            operands[2:] = [aligned_columns(x) for x in operands[2:]]
    of_query, of_key, of_sums = linear_attention_gradients(*operands, factors=factors, sums=inputs.sums)
    found = [of_query.to(of_value.dtype) + _early(of_key), of_value, (of_errors * errors).sum(-1)]
    return found if of_sums is None else [*found, of_sums]


@delta_writes_backward_operator.register_fake
def _(gradient: Tensor, written: Tensor, errors: Tensor, *arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in arguments[:4] if x is not None]


def aligned_columns(x: Tensor) -> Tensor:
    """Zeros behind its columns, up to a multiple of 16: programs read rows that begin at words of 32 bytes at once."""
    missing = -x.shape[-1] % 16
    return F.pad(x, (0, missing)) if missing else x


def _late(x: Tensor) -> Tensor:
    """Every token one place later, zeros before."""
    return F.pad(x[:, :, :-1], (0, 0, 1, 0))


def _early(x: Tensor) -> Tensor:
    """The adjoint of `_late`."""
    return F.pad(x[:, :, 1:], (0, 0, 0, 1))


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.options = inputs[4:]


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes them at each look
    inputs, output = saved[:4], saved[4:]
    found = delta_writes_backward_operator(gradient, *output, *inputs, *ctx.options)
    return (*found[:3], found[3] if len(found) == 4 else None, None, None, None)


delta_writes_operator.register_autograd(_backward, setup_context=_setup_context)


def _operations(key: Any, value: Any, factors: int) -> int:
    """Floating-point operations of a pass over sums, multiply-adds counted as two."""
    batch, heads, length, features = key
    return 4 * batch * heads * length * expanded_size(features, 1, factors) * value[3]


@counts_operations_of(torch.ops.polysketch.delta_writes)
def _forward_operations(key: Any, value: Any, strength: Any, sums: Any, factors: int, *_: Any, **__: Any) -> int:
    return _operations(key, value, factors)


@counts_operations_of(torch.ops.polysketch.delta_writes_backward)
def _backward_operations(gradient: Any, written: Any, errors: Any, key: Any, value: Any, *rest: Any, **_: Any) -> int:
    return 3 * _operations(key, value, rest[2])


@counts_operations_of(torch.ops.polysketch.delta_attention)
def _attention_operations(query: Any, key: Any, value: Any, strength: Any, factors: int, *_: Any, **__: Any) -> int:
    products = key[0] * key[2] * expanded_size(key[3], 1, factors) * value[3]
    return products * (4 * key[1] + 2 * query[1])


@counts_operations_of(torch.ops.polysketch.delta_attention_backward)
def _attention_backward_operations(
    gradient: Any, errors: Any, query: Any, key: Any, strength: Any, factors: int, *_: Any, **__: Any
) -> int:
    products = key[0] * key[2] * expanded_size(key[3], 1, factors) * errors[3]
    return products * (10 * key[1] + 4 * query[1])
