"""`rotated_heads` and its `torch.library` operators: shapes for tracing, gradients.

PyTorch's operations read and write all queries and keys a dozen times, in float32: for the norm, for its factors, for
each half of a head, and backward as often. The programs read a head of a token once, and write what is asked for.
"""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.custom_op import custom_op
from polysketch.ops.rotated_heads import reference, triton
from polysketch.ops.rotated_heads.self_check import programs_agree
from polysketch.ops.triton.availability import AUTO_DEVICES

BACKENDS = ("triton",)
"""Beside the definition, "reference"."""


def rotated_heads(
    x: Tensor,
    scale: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    eps: float = 1e-5,
    keep_normed: bool = False,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor | None]:
    """y = x / sqrt(mean(x^2) + eps) * scale over the width of a head, and y with its halves rotated by angles.

    A rotation gives (y1 cos - y2 sin, y2 cos + y1 sin) of the halves y1, y2 of y as it is rounded to the dtype of x.
    All is computed in float32 or better.

    Args:
        x: (batch, heads, length, head_dim), any strides.
        scale: (heads * head_dim,), any floating dtype; None for no norm, y = x.
        cos, sin: float32, (length, head_dim / 2), or (batch, 1, length, head_dim / 2) where rows have positions of
            their own; no gradient reaches them by the programs. None for no rotation.
        eps: added to the mean square.
        keep_normed: give y beside the rotated heads.
        backend: "auto" (see `rotated_heads_backend`), "triton" or "reference" (the definition).

    Returns:
        Normed heads, None without a scale and where they are rotated and not kept; and rotated heads, None without
        angles. Both (batch, heads, length, head_dim) in the dtype of x.

    Raises:
        ValueError: an unknown backend.
        RuntimeError: the backend that was asked for cannot run here, with the reason.
        NotImplementedError: a tensor with a forward-mode tangent, where a program runs.

    Cost: by the programs x is read once and every result written once. Backward reads x again, where there is a norm,
    and keeps nothing else.
    """
    picked = rotated_heads_backend(x, scale, cos, sin, backend)
    if picked == "reference" or (
        backend == "auto" and not programs_agree(rotated_heads, x, scale, cos, eps, keep_normed)
    ):
        return reference.rotated_heads(x, scale, cos, sin, eps, keep_normed)
    normed, rotated = rotated_heads_operator(x, scale, cos, sin, eps, keep_normed)
    return normed if triton.gives_normed(scale, cos, keep_normed) else None, None if cos is None else rotated


def rotated_heads_backend(
    x: Tensor, scale: Tensor | None, cos: Tensor | None, sin: Tensor | None, backend: str = "auto"
) -> str:
    """The backend that `rotated_heads` runs for these tensors: by "auto" the programs on CUDA devices that can run
    them. A compiler is given the definition, which it fuses.

    Where they disagreed with the definition at their first call (`ops.triton.self_check`) the answer is "triton" all
    the same, and the call runs the definition.

    Raises:
        ValueError, RuntimeError: as `rotated_heads`.
    """
    if backend == "auto":
        return "triton" if _can_take(x, scale, cos, sin) else "reference"
    if backend == "triton":
        reason = triton.why_not(x, scale, cos, sin)
        if reason is not None:
            raise RuntimeError(reason)
    elif backend != "reference":
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', 'triton' or 'reference'")
    return backend


def programs_take(
    x: Tensor,
    scale: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    eps: float = 1e-5,
    keep_normed: bool = False,
) -> bool:
    """Whether "auto" takes the programs: who has another way to compute the same asks this, and keeps it otherwise."""
    return _can_take(x, scale, cos, sin) and programs_agree(rotated_heads, x, scale, cos, eps, keep_normed)


def _can_take(x: Tensor, scale: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> bool:
    elsewhere = not x.is_cpu or "cpu" in AUTO_DEVICES  # naming a tensor's device takes a tenth of a call of one token
    if not elsewhere or torch.compiler.is_compiling():
        return False
    return x.device.type in AUTO_DEVICES and triton.why_not(x, scale, cos, sin) is None


@custom_op(
    "polysketch::rotated_heads",
    "(Tensor x, Tensor? scale, Tensor? cos, Tensor? sin, float eps, bool keep_normed) -> (Tensor, Tensor)",
)
def rotated_heads_operator(
    x: Tensor, scale: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, keep_normed: bool
) -> tuple[Tensor, Tensor]:
    """The programs' forward; what is not given has no rows."""
    with without_autocast(x.device.type):
        return triton.forward(x, scale, cos, sin, eps, keep_normed)


@custom_op(
    "polysketch::rotated_heads_backward",
    "(Tensor? of_normed, Tensor? of_rotated, Tensor? x, Tensor? scale, Tensor? cos, Tensor? sin, float eps)"
    " -> (Tensor, Tensor)",
)
def rotated_heads_backward_operator(
    of_normed: Tensor | None, of_rotated: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of scale, the latter without numbers where there is no norm."""
    with without_autocast(triton.given(of_normed, of_rotated).device.type):
        return triton.backward(of_normed, of_rotated, *arguments)


@rotated_heads_operator.register_fake
def _(
    x: Tensor, scale: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float, keep_normed: bool
) -> tuple[Tensor, Tensor]:
    return triton.outputs_of(x, scale, cos, keep_normed)


@rotated_heads_backward_operator.register_fake
def _(
    of_normed: Tensor | None, of_rotated: Tensor | None, x: Tensor | None, scale: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    upstream = triton.given(of_normed, of_rotated)
    return triton.gradient_of(upstream), upstream.new_empty(0) if scale is None else scale.new_empty(scale.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, scale, cos, sin, ctx.eps, _ = inputs
    ctx.set_materialize_grads(False)  # else zeros as large as an output that nothing came back from
    ctx.save_for_backward(None if scale is None else x, scale, cos, sin)


def _backward(ctx: Any, of_normed: Tensor | None, of_rotated: Tensor | None) -> tuple[Tensor | None, ...]:
    # What is not given is an empty vector, and tools ask for gradients through it too.
    upstream = [None if one is None or one.dim() == 1 else one for one in (of_normed, of_rotated)]
    if all(one is None for one in upstream):
        return (None,) * 6
    x, scale, cos, sin = ctx.saved_tensors
    of_x, of_scale = rotated_heads_backward_operator(*upstream, x, scale, cos, sin, ctx.eps)
    return of_x, None if scale is None else of_scale, None, None, None, None


rotated_heads_operator.register_autograd(_backward, setup_context=_setup_context)
