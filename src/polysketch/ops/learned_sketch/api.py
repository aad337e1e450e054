"""`learned_sketch` and its `torch.library` operators: shapes for tracing, gradients, operation counts.

The hidden activations of the networks are several times the size of queries, keys and values. Every backend therefore
makes them for some rows at a time, uses them while they are in cache, and makes them again in backward.
"""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.custom_op import custom_op, nothing_looks_on, refuse_tangents
from polysketch.ops.learned_sketch import chunked, native, reference, triton
from polysketch.ops.learned_sketch.networks import PAPER_ACTIVATION, PAPER_DEPTH, Networks
from polysketch.ops.learned_sketch.self_check import programs_agree
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.ops.triton.availability import AUTO_DEVICES

BACKENDS = {
    "chunked": (chunked.forward, chunked.backward),
    "native": (native.forward, native.backward),
    "triton": (triton.forward, triton.backward),
}
"""Forward and backward of each."""
_WHY_NOT = {"native": native.why_not, "triton": triton.why_not}


def learned_sketch(
    x: Tensor,
    weights: list[Tensor],
    leaves: int,
    *,
    depth: int = PAPER_DEPTH,
    activation: str = PAPER_ACTIVATION,
    backend: str = "auto",
) -> Tensor:
    """phi(x) of Algorithm 2.

    Args:
        x: (batch, heads, length, head_dim), any strides.
        weights: a flat list, see `polysketch.ops.learned_sketch.networks`; computed with in the dtype of x.
        leaves: degree / 2, the number of networks that take x.
        depth: stages of a network, each a norm, a matrix up, the activation and a matrix down; 2 in the paper.
        activation: "gelu" (the tanh form) as in the paper, "relu" or "silu".
        backend: "auto" (see `learned_sketch_backend`), "triton", "native", "chunked" or "reference" (the definition).

    Returns:
        (batch, heads, length, sketch_size), dtype of x.

    Raises:
        TypeError: a depth that is no integer.
        ValueError: an unknown backend or activation, a depth below one, or weights of other networks.
        RuntimeError: the backend that was asked for cannot run here, with the reason.
        NotImplementedError: a tensor with a forward-mode tangent, except for "reference".
    """
    networks = Networks(leaves, depth, activation)
    networks.check(weights)
    if backend == "reference":
        return reference.learned_sketch(x, weights, networks)
    picked = learned_sketch_backend(x, backend)
    refuse_tangents("learned_sketch", x, weights)
    if backend == "auto" and picked == "triton" and not programs_agree(learned_sketch, x, weights, networks):
        picked = "chunked"
    if nothing_looks_on(x, weights):
        return BACKENDS[picked][0](x, weights, networks)
    return learned_sketch_operator(x, weights, *networks, picked)


def learned_sketch_backend(x: Tensor, backend: str = "auto") -> str:
    """The backend that `learned_sketch` runs for x: "auto" picks Triton's programs on a CUDA device that can run them,
    the native one for float32, bfloat16 and float16 on a CPU with a compiler. Where programs disagreed with the chunked
    backend at their first call (`ops.triton.self_check`), which depends on the weights too, the answer is "triton" all
    the same, and the call runs the chunked backend.

    Raises:
        ValueError, RuntimeError: as `learned_sketch`.
    """
    if backend == "auto":
        if x.device.type in AUTO_DEVICES and triton.why_not(x) is None:
            return "triton"
        return "chunked" if native.why_not(x) else "native"
    if backend == "reference":
        return backend
    if backend not in BACKENDS:
        known = ", ".join(map(repr, sorted([*BACKENDS, "reference"])))
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', {known}")
    reason = _WHY_NOT[backend](x) if backend in _WHY_NOT else None
    if reason is not None:
        raise RuntimeError(reason)
    return backend


@custom_op("polysketch::learned_sketch")
def learned_sketch_operator(
    x: Tensor, weights: list[Tensor], leaves: int, depth: int, activation: str, backend: str
) -> Tensor:
    """A backend's forward."""
    with torch.autocast(x.device.type, enabled=False):
        return BACKENDS[backend][0](x, weights, Networks(leaves, depth, activation))


@custom_op("polysketch::learned_sketch_backward")
def learned_sketch_backward_operator(
    grad: Tensor, x: Tensor, weights: list[Tensor], leaves: int, depth: int, activation: str, backend: str
) -> list[Tensor]:
    """A backend's backward: gradients of x and of every weight."""
    with torch.autocast(x.device.type, enabled=False):
        return BACKENDS[backend][1](grad, x, weights, Networks(leaves, depth, activation))


@learned_sketch_operator.register_fake
def _(x: Tensor, weights: list[Tensor], *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weights[-1].shape[0])


@learned_sketch_backward_operator.register_fake
def _(grad: Tensor, x: Tensor, weights: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, *weights)]


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weights, *ctx.options = inputs
    ctx.save_for_backward(x, *weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | list[Tensor] | None, ...]:
    x, *weights = ctx.saved_tensors
    grad_x, *grad_weights = learned_sketch_backward_operator(grad, x, weights, *ctx.options)
    return grad_x, grad_weights, *(None for _ in ctx.options)


learned_sketch_operator.register_autograd(_backward, setup_context=_setup_context)


@counts_operations_of(torch.ops.polysketch.learned_sketch)
def _forward_flops(x_shape: tuple, weight_shapes: list[tuple], leaves: int, depth: int, *_: Any, **__: Any) -> int:
    batch, heads, length, _width = x_shape
    maps = len(weight_shapes) // Networks(leaves, depth).tensors
    products = sum(shape[0] * shape[1] for shape in weight_shapes if len(shape) == 2)
    return 2 * batch * heads * length * products // maps


@counts_operations_of(torch.ops.polysketch.learned_sketch_backward)
def _backward_flops(_grad: tuple, *arguments: Any, **named: Any) -> int:
    return 3 * _forward_flops(*arguments, **named)  # the recomputation, and two products for each
