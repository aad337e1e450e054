"""`gated_gelu` and its `torch.library` operators: shapes for tracing, gradients.

PyTorch's operations read and write numbers a dozen times: for gelu, for the product, backward as often and once more to
join both gradients. The programs read a projection once, and write what is asked for once.
"""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.custom_op import custom_op
from polysketch.ops.gated_gelu import reference, triton
from polysketch.ops.gated_gelu.self_check import programs_agree
from polysketch.ops.triton.availability import AUTO_DEVICES

BACKENDS = ("triton",)
"""Beside the definition, "reference"."""


def gated_gelu(joined: Tensor, *, backend: str = "auto") -> Tensor:
    """gelu(gate) * up of the halves (gate, up) of every row; gelu in its tanh form.

    The programs compute in float32 and round once, the definition in the dtype of `joined`, where it rounds gelu too.

    Args:
        joined: (..., 2 * inner), any strides.
        backend: "auto" (see `gated_gelu_backend`), "triton" or "reference" (the definition).

    Returns:
        (..., inner), in the dtype of `joined`.

    Raises:
        ValueError: rows without halves, or an unknown backend.
        RuntimeError: the backend that was asked for cannot run here, with the reason; or, where a program runs, a
            second derivative.
        NotImplementedError: a tensor with a forward-mode tangent, where a program runs.

    Cost: by the programs `joined` is read once and the result written once. Backward reads `joined` again and keeps
    nothing else.
    """
    if joined.shape[-1] % 2:
        raise ValueError(f"joined must be (..., 2 * inner), got {tuple(joined.shape)}")
    picked = gated_gelu_backend(joined, backend)
    if picked == "reference" or (backend == "auto" and not programs_agree(gated_gelu, joined)):
        return reference.gated_gelu(joined)
    return gated_gelu_operator(joined)


def gated_gelu_backend(joined: Tensor, backend: str = "auto") -> str:
    """The backend that `gated_gelu` runs for this tensor: by "auto" the programs on CUDA devices that can run them. A
    compiler is given the definition, which it fuses.

    Where they disagreed with the definition at their first call (`ops.triton.self_check`) the answer is "triton" all
    the same, and the call runs the definition.

    Raises:
        ValueError, RuntimeError: as `gated_gelu`.
    """
    if backend == "auto":
        return "triton" if _can_take(joined) else "reference"
    if backend == "triton":
        reason = triton.why_not(joined)
        if reason is not None:
            raise RuntimeError(reason)
    elif backend != "reference":
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', 'triton' or 'reference'")
    return backend


def _can_take(joined: Tensor) -> bool:
    elsewhere = not joined.is_cpu or "cpu" in AUTO_DEVICES  # naming a tensor's device takes longer than this
    if not elsewhere or torch.compiler.is_compiling():
        return False
    return joined.device.type in AUTO_DEVICES and triton.why_not(joined) is None


@custom_op("polysketch::gated_gelu")
def gated_gelu_operator(joined: Tensor) -> Tensor:
    """The program's forward."""
    return triton.forward(joined)


@custom_op("polysketch::gated_gelu_backward")
def gated_gelu_backward_operator(gradient: Tensor, joined: Tensor) -> Tensor:
    """The gradient of `joined`, from that of the result."""
    return triton.backward(gradient, joined)


@gated_gelu_operator.register_fake
def _(joined: Tensor) -> Tensor:
    return triton.output_of(joined)


@gated_gelu_backward_operator.register_fake
def _(gradient: Tensor, joined: Tensor) -> Tensor:
    return triton.gradient_of(joined)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    return gated_gelu_backward_operator(gradient, *ctx.saved_tensors)


gated_gelu_operator.register_autograd(_backward, setup_context=_setup_context)
