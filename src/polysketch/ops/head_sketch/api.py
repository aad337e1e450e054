"""`head_sketch` and its `torch.library` operators: shapes for tracing, gradients, operation counts.

PyTorch's layer norm is made for rows of thousands of numbers, and its sketch writes and reads the two products before
their product. The programs read a row of a head once, and write what is asked for.
"""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import custom_op
from polysketch.ops.head_sketch import reference, triton
from polysketch.ops.head_sketch.self_check import programs_agree
from polysketch.ops.operation_counts import counts_operations_of
from polysketch.ops.triton.availability import AUTO_DEVICES

BACKENDS = ("triton",)
"""Beside the definition, "reference"."""


def head_sketch(
    x: Tensor, scale: Tensor, bias: Tensor, matrices: Tensor | None = None, *, eps: float = 1e-5, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """y = layer_norm(x) over the width of a head, and features (y G1) * (y G2), the product entrywise.

    With Gaussian G1 and G2, scaled by r^(-1/4) each, the features are those of the random sketch of degree 4
    (PolySketchFormer, Algorithm 1). They are of y as it is rounded to the dtype of x.

    Args:
        x: (batch, heads, length, width), any strides.
        scale, bias: (width,), any floating dtype.
        matrices: (maps, 2, width, r), in the dtype of x; heads in equal runs share a map. No gradient reaches them by
            the programs. None for the norm alone.
        eps: added to the variance.
        backend: "auto" (see `head_sketch_backend`), "triton" or "reference" (the definition).

    Returns:
        Normed heads, (batch, heads, length, width), and features, (batch, heads, length, r), None without matrices;
        both in the dtype of x.

    Raises:
        ValueError: an unknown backend.
        RuntimeError: the backend that was asked for cannot run here, with the reason.
        NotImplementedError: a tensor with a forward-mode tangent, where a program runs.

    Cost: 2 width r multiply-adds a token and head, and twice that backward, which makes products again; by the
    programs x is read once and every result written once.
    """
    picked = head_sketch_backend(x, scale, matrices, backend)
    if picked == "reference" or (backend == "auto" and not programs_agree(head_sketch, x, scale, matrices, eps)):
        return reference.head_sketch(x, scale, bias, matrices, eps)
    normed, features = head_sketch_operator(x, scale, bias, matrices, eps)
    return normed, None if matrices is None else features


def head_sketch_backend(x: Tensor, scale: Tensor, matrices: Tensor | None = None, backend: str = "auto") -> str:
    """The backend that `head_sketch` runs for these tensors: by "auto" the programs on CUDA devices that can run them.

    Where they disagreed with the definition at their first call (`ops.triton.self_check`) the answer is "triton" all
    the same, and the call runs the definition.

    Raises:
        ValueError, RuntimeError: as `head_sketch`.
    """
    if backend == "auto":
        return "triton" if _can_take(x, scale, matrices) else "reference"
    if backend == "triton":
        reason = triton.why_not(x, scale, matrices)
        if reason is not None:
            raise RuntimeError(reason)
    elif backend != "reference":
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', 'triton' or 'reference'")
    return backend


def programs_take(x: Tensor, scale: Tensor, matrices: Tensor | None = None, *, eps: float = 1e-5) -> bool:
    """Whether "auto" takes the programs: who has another way to compute the same asks this, and keeps it otherwise."""
    return _can_take(x, scale, matrices) and programs_agree(head_sketch, x, scale, matrices, eps)


def _can_take(x: Tensor, scale: Tensor, matrices: Tensor | None) -> bool:
    elsewhere = not x.is_cpu or "cpu" in AUTO_DEVICES  # naming a tensor's device takes a tenth of a call of one token
    if not elsewhere or torch.compiler.is_exporting():
        return False  # an exported graph is for other machines and programs
    return x.device.type in AUTO_DEVICES and triton.why_not(x, scale, matrices) is None


@custom_op(
    "polysketch::head_sketch",
    "(Tensor x, Tensor scale, Tensor bias, Tensor? matrices, float eps) -> (Tensor, Tensor)",
)
def head_sketch_operator(
    x: Tensor, scale: Tensor, bias: Tensor, matrices: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The programs' forward; features of width 0 without matrices."""
    with without_autocast(x.device.type):
        return triton.forward(x, scale, bias, matrices, eps)


@custom_op(
    "polysketch::head_sketch_backward",
    "(Tensor? of_normed, Tensor? of_features, Tensor x, Tensor scale, Tensor bias, Tensor? matrices, float eps)"
    " -> (Tensor, Tensor)",
)
def head_sketch_backward_operator(
    of_normed: Tensor | None, of_features: Tensor | None, x: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of scale and bias as one, for results share no memory."""
    with without_autocast(x.device.type):
        return triton.backward(of_normed, of_features, x, *arguments)


@head_sketch_operator.register_fake
def _(x: Tensor, scale: Tensor, bias: Tensor, matrices: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return triton.outputs_of(x, matrices)


@head_sketch_backward_operator.register_fake
def _(
    of_normed: Tensor | None, of_features: Tensor | None, x: Tensor, scale: Tensor, bias: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(scale.dtype, bias.dtype)
    return triton.gradient_of(x), scale.new_empty(2, *scale.shape, dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps = inputs
    ctx.set_materialize_grads(False)  # else zeros as large as an output that nothing came back from
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, of_normed: Tensor | None, of_features: Tensor | None) -> tuple[Tensor | None, ...]:
    found, of_both = head_sketch_backward_operator(of_normed, of_features, *ctx.saved_tensors, ctx.eps)
    of_scale, of_bias = of_both.unbind()
    return found, of_scale, of_bias, None, None


head_sketch_operator.register_autograd(_backward, setup_context=_setup_context)


@counts_operations_of(torch.ops.polysketch.head_sketch)
def _forward_operations(x: Any, scale: Any, bias: Any, matrices: Any = None, *_: Any, **__: Any) -> int:
    return 0 if matrices is None else 4 * x[0] * x[1] * x[2] * x[3] * matrices[3]


@counts_operations_of(torch.ops.polysketch.head_sketch_backward)
def _backward_operations(
    of_normed: Any, of_features: Any, x: Any, scale: Any, bias: Any, matrices: Any = None, *_: Any, **__: Any
) -> int:
    # Products made again, and one for each.
    return 0 if of_features is None else 2 * _forward_operations(x, scale, bias, matrices)
