"""`low_rank_sketch` and its `torch.library` operators: shapes for tracing, gradients, operation counts.

Linear maps are several times the size of what they are made of and of the features. The programs of either backend
therefore multiply them while they are in a cache or in registers, and make them again in backward.
"""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import custom_op
from polysketch.ops.low_rank_sketch import native, reference, triton
from polysketch.ops.low_rank_sketch.self_check import programs_agree
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.ops.triton.availability import AUTO_DEVICES

BACKENDS = {"native": (native.forward, native.backward), "triton": (triton.forward, triton.backward)}
"""Forward and backward of each."""
_WHY_NOT = {"native": native.why_not, "triton": triton.why_not}


def low_rank_sketch(x: Tensor, factors: Tensor, *, backend: str = "auto") -> Tensor:
    """Features f = sum_t prod_j x Theta_tj, products entrywise (LLOPS, section 3.2).

    Programs do not keep linear maps for backward; PyTorch's operations do.

    Args:
        x: (batch, heads, length, inputs), any strides.
        factors: (maps, rank, degree, inputs, features), in the dtype of x; heads in equal runs share a map.
        backend: "auto" (see `low_rank_sketch_backend`), "triton", "native" or "reference" (the definition).

    Returns:
        (batch, heads, length, features), dtype of x.

    Raises:
        ValueError: an unknown backend.
        RuntimeError: the backend that was asked for cannot run here, with the reason.
        NotImplementedError: a tensor with a forward-mode tangent, where a program runs.

    Cost: rank degree inputs features multiply-adds a token and head, and three times that backward, of which one third
    is for making the maps again.
    """
    picked = _auto(x, factors) if backend == "auto" else low_rank_sketch_backend(x, factors, backend)
    if backend == "auto" and picked == "triton" and not programs_agree(low_rank_sketch, x, factors):
        picked = "reference"
    if picked == "reference":
        return reference.low_rank_sketch(x, factors)
    return low_rank_sketch_operator(x, factors, picked)


def low_rank_sketch_backend(x: Tensor, factors: Tensor, backend: str = "auto") -> str:
    """The backend that `low_rank_sketch` runs for these tensors.

    "auto" picks Triton's programs on a CUDA device that can run them, and the native ones on a CPU with a compiler; but
    the definition in float32 for less than 16 tokens there, and where a gradient is wanted of so few tokens that their
    linear maps are less than 16 MB. Where Triton's programs disagreed with the definition at their first call
    (`ops.triton.self_check`) the answer is "triton" all the same, and the call runs the definition.

    Raises:
        ValueError, RuntimeError: as `low_rank_sketch`.
    """
    if backend == "auto":
        return _auto(x, factors)
    if backend == "reference":
        return backend
    if backend not in BACKENDS:
        known = ", ".join(map(repr, sorted([*BACKENDS, "reference"])))
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', {known}")
    reason = _WHY_NOT[backend](x, factors)
    if reason is not None:
        raise RuntimeError(reason)
    return backend


def _auto(x: Tensor, factors: Tensor) -> str:
    if torch.compiler.is_exporting():
        return "reference"  # a graph is for other machines and programs, and for any number of tokens
    elsewhere = not x.is_cpu or "cpu" in AUTO_DEVICES  # naming a tensor's device takes a tenth of a call of one token
    if elsewhere and x.device.type in AUTO_DEVICES and triton.why_not(x, factors) is None:
        return "triton"
    return "reference" if native.why_not(x, factors) is not None or _is_quicker_kept(x, factors) else "native"


_CACHED = 2**22  # numbers that stay in the caches from forward to backward


def _is_quicker_kept(x: Tensor, factors: Tensor) -> bool:
    """Whether a gradient is wanted, and linear maps are so few that keeping them costs less than making them again.

    Not in half precision: PyTorch's products there cost more than all of it.
    """
    if x.dtype != torch.float32:
        return False
    wanted = torch.is_grad_enabled() and (x.requires_grad or factors.requires_grad)
    _, rank, degree, _, features = factors.shape
    return wanted and x.shape[:3].numel() * rank * degree * features < _CACHED


@custom_op("polysketch::low_rank_sketch")
def low_rank_sketch_operator(x: Tensor, factors: Tensor, backend: str) -> Tensor:
    """A backend's forward."""
    with without_autocast(x.device.type):
        return BACKENDS[backend][0](x, factors)


@custom_op("polysketch::low_rank_sketch_backward")
def low_rank_sketch_backward_operator(
    upstream: Tensor, x: Tensor, factors: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    """A backend's backward: gradients of x and of the factors."""
    with without_autocast(x.device.type):
        return BACKENDS[backend][1](upstream, x, factors)


@low_rank_sketch_operator.register_fake
def _(x: Tensor, factors: Tensor, _: str) -> Tensor:
    return x.new_empty(*x.shape[:3], factors.shape[-1])


@low_rank_sketch_backward_operator.register_fake
def _(upstream: Tensor, x: Tensor, factors: Tensor, _: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), factors.new_empty(factors.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
    return *low_rank_sketch_backward_operator(upstream, *ctx.saved_tensors, ctx.backend), None


low_rank_sketch_operator.register_autograd(_backward, setup_context=_setup_context)


@counts_operations_of(torch.ops.polysketch.low_rank_sketch)
def _forward_operations(x: Any, factors: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] * x[1] * x[2] * factors[1] * factors[2] * factors[3] * factors[4]


@counts_operations_of(torch.ops.polysketch.low_rank_sketch_backward)
def _backward_operations(upstream: Any, x: Any, factors: Any, *_: Any, **__: Any) -> int:
    return 3 * _forward_operations(x, factors)  # maps made again, and two products for each
