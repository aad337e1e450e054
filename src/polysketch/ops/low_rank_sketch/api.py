"""`low_rank_sketch`, and the native backend as a `torch.library` operator: shapes, gradients, operation counts."""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.custom_op import custom_op
from polysketch.ops.low_rank_sketch import native, reference
from polysketch.ops.operation_counts import counts_operations_of


def low_rank_sketch(x: Tensor, factors: Tensor) -> Tensor:
    """Features f = sum_t prod_j x Theta_tj, products entrywise (LLOPS, section 3.2).

    In float32 on a CPU this is a program in C++ where there is a compiler, and linear maps are not kept for backward.
    It is PyTorch's operations elsewhere, for less than 16 tokens, and where a gradient is wanted of so few tokens that
    their linear maps are less than 16 MB.

    Args:
        x: (batch, heads, length, inputs), any strides.
        factors: (maps, rank, degree, inputs, features), in the dtype of x; heads in equal runs share a map.

    Returns:
        (batch, heads, length, features), dtype of x.

    Raises:
        NotImplementedError: a tensor with a forward-mode tangent, where the program runs.

    Cost: rank degree inputs features multiply-adds a token and head, and three times that backward, of which one third
    is for making the maps again.
    """
    exporting = (
        torch.compiler.is_exporting()
    )  # a graph is for other machines and programs, and for any number of tokens
    if exporting or native.why_not(x, factors) is not None or _is_quicker_kept(x, factors):
        return reference.low_rank_sketch(x, factors)
    return low_rank_sketch_operator(x, factors)


_CACHED = 2**22  # numbers that stay in the caches from forward to backward


def _is_quicker_kept(x: Tensor, factors: Tensor) -> bool:
    """Whether a gradient is wanted, and linear maps are so few that keeping them costs less than making them again."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or factors.requires_grad)
    _, rank, degree, _, features = factors.shape
    return wanted and x.shape[:3].numel() * rank * degree * features < _CACHED


@custom_op("polysketch::low_rank_sketch")
def low_rank_sketch_operator(x: Tensor, factors: Tensor) -> Tensor:
    """The program's forward."""
    with torch.autocast("cpu", enabled=False):
        return native.forward(x, factors)


@custom_op("polysketch::low_rank_sketch_backward")
def low_rank_sketch_backward_operator(upstream: Tensor, x: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """The program's backward: gradients of x and of the factors."""
    with torch.autocast("cpu", enabled=False):
        return native.backward(upstream, x, factors)


@low_rank_sketch_operator.register_fake
def _(x: Tensor, factors: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:3], factors.shape[-1])


@low_rank_sketch_backward_operator.register_fake
def _(upstream: Tensor, x: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), factors.new_empty(factors.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
    return low_rank_sketch_backward_operator(upstream, *ctx.saved_tensors)


low_rank_sketch_operator.register_autograd(_backward, setup_context=_setup_context)


@counts_operations_of(torch.ops.polysketch.low_rank_sketch)
def _forward_operations(x: Any, factors: Any, **_: Any) -> int:
    return 2 * x[0] * x[1] * x[2] * factors[1] * factors[2] * factors[3] * factors[4]


@counts_operations_of(torch.ops.polysketch.low_rank_sketch_backward)
def _backward_operations(upstream: Any, x: Any, factors: Any, **_: Any) -> int:
    return 3 * _forward_operations(x, factors)  # maps made again, and two products for each
