"""`causal_convolution`, who computes it, and the same for both sides."""

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.convolution import reference, triton
from polysketch.ops.convolution.checks import check, check_odd, check_tail, masked
from polysketch.ops.convolution.operator import causal_convolution_operator
from polysketch.ops.convolution.self_check import programs_agree
from polysketch.ops.triton.availability import AUTO_DEVICES

BACKENDS = ("triton",)
"""Beside the definition, "reference"."""


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    key_mask: Tensor | None = None,
    tail: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """y_i = sum_t weight_t x_{i - (size - 1) + t}, every head and channel by itself; the last tap is the token's own.

    Before the first token stand zeros, or the `tail` of an earlier call, so that a sequence given in pieces gives what
    it gives whole. Masked tokens count as zeros: padding on the left changes nothing.

    Args:
        x: (batch, heads, length, width), floating point, any strides.
        weight: (heads or 1, width or 1, size).
        key_mask: (batch, length) bool, True for a real token.
        tail: (batch, heads, size - 1, width), the inputs before these; zeros when None.
        backend: "auto" (see `causal_convolution_backend`), "triton" or "reference" (the definition).

    Returns:
        The output, shaped like x and in its dtype, and the tail after the last token, in the wider of the dtypes of x
        and `tail`. Both are differentiable. Sums are float32, or float64 for float64 inputs, under autocast too.

    Raises:
        ValueError: shapes that do not fit, or an unknown backend.
        TypeError: an x that is not floating, or a mask that is not bool.
        RuntimeError: the backend that was asked for cannot run here, with the reason; or, where a program runs, a
            second derivative.
        NotImplementedError: a tensor with a forward-mode tangent, where a program runs.

    Cost: `size` multiply-adds an entry of x; by the programs x is read once and the output written once, and backward
    x and the gradient of the output are read once and that of x is written.
    """
    check(x, weight, 3, key_mask)
    check_tail(x, weight, tail)
    picked = causal_convolution_backend(x, weight, tail, backend)
    if picked == "reference" or (
        backend == "auto" and not programs_agree(causal_convolution, x, weight, key_mask, tail)
    ):
        return reference.causal_convolution(x, weight, key_mask, tail)
    output = causal_convolution_operator(x, _taps(x, weight), key_mask, tail)
    return output, _tail_after(x, weight.shape[2] - 1, key_mask, tail)


def causal_convolution_backend(x: Tensor, weight: Tensor, tail: Tensor | None = None, backend: str = "auto") -> str:
    """The backend that `causal_convolution` runs for these tensors: by "auto" the programs on CUDA devices.

    There too the definition for a single token, for dtypes that the programs do not have, and while a graph is compiled
    or exported: a compiler makes one program of it and of what stands around. Where the programs disagreed with the
    definition at their first call (`ops.triton.self_check`) the answer is "triton" all the same, and the call runs the
    definition.

    Raises:
        ValueError, RuntimeError: as `causal_convolution`.
    """
    if backend == "auto":
        return "triton" if _can_take(x, weight, tail) else "reference"
    if backend == "triton":
        reason = triton.why_not(x, weight, tail)
        if reason is not None:
            raise RuntimeError(reason)
    elif backend != "reference":
        raise ValueError(f"unknown backend {backend!r}; expected 'auto', 'triton' or 'reference'")
    return backend


def centred_convolution(x: Tensor, weight: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """y_i = sum_t weight_t x_{i - (size - 1) / 2 + t}: `causal_convolution` for both sides; the middle tap is the own.

    Zeros stand before and after the sequence; arguments, errors and cost are otherwise those of `causal_convolution`.

    Args:
        x: (batch, heads, length, width), floating point.
        weight: (heads or 1, width or 1, size), of odd size.
        key_mask: (batch, length) bool, True for a real token.

    Returns:
        Shaped like x and in its dtype.
    """
    check(x, weight, 3, key_mask)
    check_odd(weight, 2)
    after = weight.shape[2] // 2
    output, _ = causal_convolution(F.pad(masked(x, key_mask), (0, 0, 0, after)), weight)
    return output[:, :, after:]


def _can_take(x: Tensor, weight: Tensor, tail: Tensor | None) -> bool:
    elsewhere = not x.is_cpu or "cpu" in AUTO_DEVICES  # naming a tensor's device takes a tenth of a call of one token
    if not elsewhere or torch.compiler.is_compiling() or x.shape[2] < 2:
        return False
    return x.device.type in AUTO_DEVICES and triton.why_not(x, weight, tail) is None


def _taps(x: Tensor, weight: Tensor) -> Tensor:
    """(heads, size, width), float32: neighbouring channels side by side, as in x."""
    return weight.float().expand(x.shape[1], x.shape[3], -1).mT.contiguous()


def _tail_after(x: Tensor, reach: int, key_mask: Tensor | None, tail: Tensor | None) -> Tensor:
    """The last `reach` inputs in memory of their own: a view would keep all of x alive."""
    length = x.shape[2]
    if length < reach:
        before = x.new_zeros(*x.shape[:2], reach, x.shape[3]) if tail is None else tail
        return torch.cat([before[:, :, length:], masked(x, key_mask)], 2)
    last = masked(x[:, :, length - reach :], None if key_mask is None else key_mask[:, length - reach :])
    return last.to(x.dtype if tail is None else torch.promote_types(tail.dtype, x.dtype), copy=True)
