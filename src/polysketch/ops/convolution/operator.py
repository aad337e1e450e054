"""The programs of `causal_convolution` as `torch.library` operators: shapes for tracing, and gradients."""

from typing import Any

from torch import Tensor

from polysketch.ops.convolution import triton
from polysketch.ops.custom_op import custom_op


@custom_op(
    "polysketch::causal_convolution",
    "(Tensor x, Tensor taps, Tensor? key_mask, Tensor? tail) -> Tensor",
)
def causal_convolution_operator(x: Tensor, taps: Tensor, key_mask: Tensor | None, tail: Tensor | None) -> Tensor:
    """The output; taps (heads, size, width) in float32, the other arguments as `causal_convolution`."""
    return triton.forward(x, taps, key_mask, tail)


@custom_op(
    "polysketch::causal_convolution_backward",
    "(Tensor gradient, Tensor x, Tensor taps, Tensor? key_mask, Tensor? tail) -> (Tensor, Tensor, Tensor)",
)
def causal_convolution_backward_operator(
    gradient: Tensor, x: Tensor, taps: Tensor, key_mask: Tensor | None, tail: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, taps and tail from that of the output; that of no tail is empty."""
    return triton.backward(gradient, x, taps, key_mask, tail)


@causal_convolution_operator.register_fake
def _(x: Tensor, taps: Tensor, key_mask: Tensor | None, tail: Tensor | None) -> Tensor:
    return triton.output_of(x)


@causal_convolution_backward_operator.register_fake
def _(
    gradient: Tensor, x: Tensor, taps: Tensor, key_mask: Tensor | None, tail: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return triton.gradient_of(x), taps.new_empty(taps.shape), triton.gradient_of_tail(x, tail)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, taps, key_mask, tail = ctx.saved_tensors
    of_x, of_taps, of_tail = causal_convolution_backward_operator(gradient, x, taps, key_mask, tail)
    return of_x, of_taps, None, None if tail is None else of_tail


causal_convolution_operator.register_autograd(_backward, setup_context=_setup_context)
