"""The definition, in PyTorch's operations."""

from typing import Any

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.convolution.checks import masked, sum_dtype, tail_shape


def causal_convolution(
    x: Tensor, weight: Tensor, key_mask: Tensor | None, tail: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output and the tail after it; arguments as `polysketch.ops.causal_convolution`."""
    with without_autocast(x.device.type):
        before = x.new_zeros(tail_shape(x, weight)) if tail is None else tail
        seen = torch.cat([before, masked(x, key_mask)], 2)
        output = _convolved(seen.to(sum_dtype(x)), weight.to(sum_dtype(x)).mT, x.shape[2])
    # A copy: a view would keep all of `seen` alive.
    return output.to(x.dtype), seen[:, :, x.shape[2] :].clone()


def _convolved(seen: Tensor, taps: Tensor, length: int) -> Tensor:
    """(batch, heads, size - 1 + length, width) and taps (heads or 1, size, width or 1) -> (.., length, width)."""
    if length == 1:
        return (seen * taps).sum(2, keepdim=True)
    taps = taps.contiguous()
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _sum_of_taps(seen, taps, length)
    return _SumOfTaps.apply(seen, taps, length)


def _sum_of_taps(seen: Tensor, taps: Tensor, length: int) -> Tensor:
    output = seen[:, :, :length] * taps[:, :1]
    for tap in range(1, taps.shape[1]):
        output = output.addcmul_(seen[:, :, tap : tap + length], taps[:, tap : tap + 1])
    return output


class _SumOfTaps(torch.autograd.Function):
    """`_sum_of_taps`, its gradients summed in place: by operations of autograd's own they take twice the time."""

    @staticmethod
    def forward(seen: Tensor, taps: Tensor, length: int) -> Tensor:
        return _sum_of_taps(seen, taps, length)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        seen, taps, _ = inputs
        ctx.save_for_backward(seen, taps)
        ctx.save_for_forward(seen, taps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,), (seen, taps) = gradients, ctx.saved_tensors
        needs_seen, needs_taps, _ = ctx.needs_input_grad
        of_seen = _spread_to_taps(gradient, taps) if needs_seen else None
        of_taps = _products_of_taps(gradient, seen, taps) if needs_taps else None
        return of_seen, of_taps, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        (of_seen, of_taps, _), (seen, taps) = tangents, ctx.saved_tensors
        length = seen.shape[2] - taps.shape[1] + 1
        moved = taps.new_zeros(()) if of_seen is None else _sum_of_taps(of_seen, taps, length)
        return moved if of_taps is None else moved + _sum_of_taps(seen, of_taps, length)


def _spread_to_taps(gradient: Tensor, taps: Tensor) -> Tensor:
    """The gradient of what was seen."""
    batch, heads, length, width = gradient.shape
    size = taps.shape[1]
    spread = gradient.new_zeros(batch, heads, size - 1 + length, width)
    for tap in range(size):
        spread[:, :, tap : tap + length].addcmul_(gradient, taps[:, tap : tap + 1])
    return spread


def _products_of_taps(gradient: Tensor, seen: Tensor, taps: Tensor) -> Tensor:
    """The gradient of the taps, shaped like them."""
    length = gradient.shape[2]
    products = [(gradient * seen[:, :, tap : tap + length]).sum((0, 2)) for tap in range(taps.shape[1])]
    return torch.stack(products, 1).sum_to_size(taps.shape)
