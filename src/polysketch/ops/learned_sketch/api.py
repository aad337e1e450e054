"""`learned_sketch` and its `torch.library` operators: shapes for tracing, gradients, operation counts.

The hidden activations of the networks are several times the size of queries, keys and values. Every backend therefore
makes them for some rows at a time, uses them while they are in cache, and makes them again in backward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import custom_op, nothing_looks_on, refuse_tangents
from polysketch.ops.learned_sketch import chunked, native, one_by_one, reference, triton
from polysketch.ops.learned_sketch.gradients import dtype_of_all, length_of_all, parts_of
from polysketch.ops.learned_sketch.networks import PAPER_ACTIVATION, PAPER_DEPTH, Networks
from polysketch.ops.learned_sketch.self_check import programs_agree
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.ops.triton.availability import AUTO_DEVICES

BACKENDS: dict[str, tuple[Callable[..., list[Tensor]], Callable[..., list[Tensor]]]] = {
    "chunked": (partial(one_by_one.forward, chunked.forward), partial(one_by_one.backward, chunked.backward)),
    "native": (partial(one_by_one.forward, native.forward), partial(one_by_one.backward, native.backward)),
    "triton": (triton.forward, triton.backward),
}
"""Forward and backward of each: features of all inputs; gradients of all inputs, and last of all weights as one."""
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
    return learned_sketches([x], weights, leaves, depth=depth, activation=activation, backend=backend)[0]


def learned_sketches(
    inputs: Sequence[Tensor],
    weights: list[Tensor],
    leaves: int,
    *,
    depth: int = PAPER_DEPTH,
    activation: str = PAPER_ACTIVATION,
    backend: str = "auto",
) -> list[Tensor]:
    """phi of several tensors, as queries and keys, by the same networks: `learned_sketch` of each.

    Weights are prepared once, and their gradients come added up, which spares a device many small computations.

    Args:
        inputs: one or more, each as x of `learned_sketch`, of one dtype and width, on one device; other sizes may
            differ.
        weights, leaves, depth, activation, backend: as of `learned_sketch`.

    Returns:
        Features of each, in order.

    Raises:
        ValueError: inputs of several dtypes, widths or devices, or none; otherwise as `learned_sketch`.
        TypeError, RuntimeError, NotImplementedError: as `learned_sketch`.
    """
    inputs, networks = list(inputs), Networks(leaves, depth, activation)
    networks.check(weights)
    if len({(x.dtype, x.device, x.shape[-1]) for x in inputs}) != 1:
        given = ", ".join(f"{x.dtype} of width {x.shape[-1]} on {x.device}" for x in inputs)
        raise ValueError(f"expected inputs of one dtype and width on one device, got {given or 'none'}")
    if backend == "reference":
        return [reference.learned_sketch(x, weights, networks) for x in inputs]
    picked = learned_sketch_backend(inputs[0], backend)
    refuse_tangents("learned_sketch", inputs, weights)
    if backend == "auto" and picked == "triton" and not programs_agree(learned_sketch, inputs[0], weights, networks):
        picked = "chunked"
    if nothing_looks_on(inputs, weights):
        return BACKENDS[picked][0](inputs, weights, networks)
    return learned_sketch_operator(inputs, weights, *networks, picked)


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
    inputs: list[Tensor], weights: list[Tensor], leaves: int, depth: int, activation: str, backend: str
) -> list[Tensor]:
    """A backend's forward."""
    with without_autocast(inputs[0].device.type):
        return BACKENDS[backend][0](inputs, weights, Networks(leaves, depth, activation))


@custom_op("polysketch::learned_sketch_backward")
def learned_sketch_backward_operator(
    grads: list[Tensor],
    inputs: list[Tensor],
    weights: list[Tensor],
    leaves: int,
    depth: int,
    activation: str,
    backend: str,
) -> list[Tensor]:
    """A backend's backward: gradients of every input, and last of all weights as one, for results share no memory."""
    with without_autocast(inputs[0].device.type):
        return BACKENDS[backend][1](grads, inputs, weights, Networks(leaves, depth, activation))


@learned_sketch_operator.register_fake
def _(inputs: list[Tensor], weights: list[Tensor], *_: Any) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weights[-1].shape[0]) for x in inputs]


@learned_sketch_backward_operator.register_fake
def _(grads: list[Tensor], inputs: list[Tensor], weights: list[Tensor], *_: Any) -> list[Tensor]:
    of_weights = weights[0].new_empty(length_of_all(weights), dtype=dtype_of_all(weights))
    return [*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs), of_weights]


def _setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    taken, weights, *ctx.options = inputs
    ctx.taken = len(taken)
    ctx.save_for_backward(*taken, *weights)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor] | None, ...]:
    saved = list(ctx.saved_tensors)  # recomputation gives them once
    inputs, weights = saved[: ctx.taken], saved[ctx.taken :]
    *grad_inputs, grad_weights = learned_sketch_backward_operator(grads, inputs, weights, *ctx.options)
    return grad_inputs, parts_of(grad_weights, weights), *(None for _ in ctx.options)


learned_sketch_operator.register_autograd(_backward, setup_context=_setup_context)


@counts_operations_of(torch.ops.polysketch.learned_sketch)
def _forward_flops(
    input_shapes: list[tuple], weight_shapes: list[tuple], leaves: int, depth: int, *_: Any, **__: Any
) -> int:
    vectors = sum(batch * heads * length for batch, heads, length, _width in input_shapes)
    maps = len(weight_shapes) // Networks(leaves, depth).tensors
    products = sum(shape[0] * shape[1] for shape in weight_shapes if len(shape) == 2)
    return 2 * vectors * products // maps


@counts_operations_of(torch.ops.polysketch.learned_sketch_backward)
def _backward_flops(_grads: list[tuple], *arguments: Any, **named: Any) -> int:
    return 3 * _forward_flops(*arguments, **named)  # the recomputation, and two products for each
