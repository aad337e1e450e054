"""Depthwise convolutions over tokens: causal with a tail for decoding, centred, and two-dimensional over a grid."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_convolution(
    x: Tensor, weight: Tensor, *, key_mask: Tensor | None = None, tail: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y_i = sum_t weight_t x_{i - (size - 1) + t}, every head and channel by itself; the last tap is the token's own.

    Before the first token stand zeros, or the `tail` of an earlier call, so that a sequence given in pieces gives what
    it gives whole. Masked tokens count as zeros: padding on the left changes nothing.

    Args:
        x: (batch, heads, length, width), floating point.
        weight: (heads or 1, width or 1, size).
        key_mask: (batch, length) bool, True for a real token.
        tail: (batch, heads, size - 1, width), the inputs before these; zeros when None.

    Returns:
        The output, shaped like x and in its dtype, and the tail after the last token, in the wider of the dtypes of x
        and `tail`. Both are differentiable. Sums are float32, or float64 for float64 inputs, under autocast too.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: an x that is not floating, or a mask that is not bool.

    Cost: `size` multiply-adds an entry of x.
    """
    _check(x, weight, 3, key_mask)
    size = weight.shape[2]
    tail_shape = (*x.shape[:2], size - 1, x.shape[3])
    if tail is not None and tuple(tail.shape) != tail_shape:
        raise ValueError(f"tail must be (batch, heads, size - 1, width) = {tail_shape}, got {tuple(tail.shape)}")
    with torch.autocast(x.device.type, enabled=False):
        seen = torch.cat([x.new_zeros(tail_shape) if tail is None else tail, _masked(x, key_mask)], 2)
        output = _convolved(seen.to(_sum_dtype(x)), weight.to(_sum_dtype(x)).mT.contiguous(), x.shape[2])
    # A copy: a view would keep all of `seen` alive.
    return output.to(x.dtype), seen[:, :, x.shape[2] :].clone()


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
    _check(x, weight, 3, key_mask)
    _check_odd(weight, 2)
    after = weight.shape[2] // 2
    output, _ = causal_convolution(F.pad(_masked(x, key_mask), (0, 0, 0, after)), weight)
    return output[:, :, after:]


def depthwise_convolution_2d(
    x: Tensor, weight: Tensor, height: int, width: int, *, key_mask: Tensor | None = None
) -> Tensor:
    """Convolve tokens that are a picture's patches, row by row, every head and channel by itself.

    The middle tap is the token's own; zeros stand around the picture.

    Args:
        x: (batch, heads, height * width, channels), floating point.
        weight: (heads or 1, channels or 1, rows, columns), both odd.
        height, width: of the picture in tokens.
        key_mask: (batch, height * width) bool; masked tokens count as zeros.

    Returns:
        Shaped like x and in its dtype. Sums are float32, or float64 for float64 inputs, under autocast too.

    Raises:
        ValueError: shapes that do not fit, or another number of tokens than height * width.
        TypeError: an x that is not floating, or a mask that is not bool.

    Cost: rows * columns multiply-adds an entry of x.
    """
    _check(x, weight, 4, key_mask)
    _check_odd(weight, 2, 3)
    batch, heads, length, channels = x.shape
    if length != height * width:
        raise ValueError(
            f"a grid of {height} x {width} holds {height * width} tokens, got a length of {length};"
            " are there tokens that are no patches, such as a class token or padding?"
        )
    picture = _masked(x, key_mask).to(_sum_dtype(x)).transpose(2, 3).reshape(batch, heads * channels, height, width)
    taps = weight.to(_sum_dtype(x)).expand(heads, channels, -1, -1).reshape(heads * channels, 1, *weight.shape[2:])
    padding = (weight.shape[2] // 2, weight.shape[3] // 2)
    with torch.autocast(x.device.type, enabled=False):
        output = F.conv2d(picture, taps, padding=padding, groups=heads * channels)
    return output.reshape(batch, heads, channels, length).transpose(2, 3).to(x.dtype)


def _convolved(seen: Tensor, taps: Tensor, length: int) -> Tensor:
    """(batch, heads, size - 1 + length, width) and taps (heads or 1, size, width or 1) -> (.., length, width)."""
    if length == 1:
        return (seen * taps).sum(2, keepdim=True)
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


def _masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zeros where there is no real token; whatever stood there, NaN too, is gone."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0.0)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check(x: Tensor, weight: Tensor, weight_dim: int, key_mask: Tensor | None) -> None:
    if x.dim() != 4:
        raise ValueError(f"x must be (batch, heads, length, width), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    shape = tuple(weight.shape)
    if len(shape) != weight_dim or shape[0] not in (1, x.shape[1]) or shape[1] not in (1, x.shape[3]) or 0 in shape:
        sizes = "size" if weight_dim == 3 else "rows, columns"
        raise ValueError(f"weight must be ({x.shape[1]} or 1, {x.shape[3]} or 1, {sizes}), got {shape}")
    if key_mask is not None and key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask must be bool, True where a token is real, got {key_mask.dtype}")
    if key_mask is not None and tuple(key_mask.shape) != (x.shape[0], x.shape[2]):
        expected = (x.shape[0], x.shape[2])
        raise ValueError(f"key_mask must be (batch, length) = {expected}, got {tuple(key_mask.shape)}")


def _check_odd(weight: Tensor, *dims: int) -> None:
    if any(weight.shape[dim] % 2 == 0 for dim in dims):
        sizes = " x ".join(str(weight.shape[dim]) for dim in dims)
        raise ValueError(f"a convolution without causality needs an odd number of taps to have a middle, got {sizes}")
