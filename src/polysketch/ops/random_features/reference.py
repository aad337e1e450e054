"""The definition, in PyTorch's operations."""

from collections.abc import Callable

import torch
from torch import Tensor

from polysketch.ops.autocast import without_autocast

SOFTMAX_EPSILON = 1e-6
RELU_EPSILON = 1e-3
# No feature of a key exceeds exp of this: sums of very many stay far below the largest float32, exp(88).
LARGEST_EXPONENT = 40.0


def random_features(x: Tensor, weight: Tensor, key_constant: Tensor | None, kind: str) -> Tensor:
    """m^(-1/2) f(W x'); arguments as `polysketch.ops.random_features.random_features`."""
    projected, scaled = projections(x, weight)
    with without_autocast(x.device.type):
        constant = None if key_constant is None else key_constant.to(projected.dtype)
        return KINDS[kind](projected, scaled, constant) * weight.shape[0] ** -0.5


def projections(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """u = W x' and x' = x head_dim^(-1/4), in float32 or better."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    with without_autocast(x.device.type):
        scaled = x.to(dtype) * x.shape[-1] ** -0.25
        return scaled @ weight.to(dtype).mT, scaled


def _softmax_features(projected: Tensor, scaled: Tensor, key_constant: Tensor | None) -> Tensor:
    if key_constant is None:
        # |x'|^2 / 2 is in all exponents of a query: it goes with their maximum.
        return (projected - projected.amax(-1, keepdim=True)).exp() + SOFTMAX_EPSILON
    exponent = projected - scaled.square().sum(-1, keepdim=True) / 2
    return (exponent - key_constant).clamp(max=LARGEST_EXPONENT).exp() + SOFTMAX_EPSILON * (-key_constant).exp()


def _relu_features(projected: Tensor, scaled: Tensor, key_constant: Tensor | None) -> Tensor:
    return projected.relu() + RELU_EPSILON


KINDS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "softmax": _softmax_features,
    "relu": _relu_features,
}
"""f of every kind, of u, x' and the keys' constant, or None for a query."""
