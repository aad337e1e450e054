"""The tanh form of GELU and its derivative, on a CPU by the sigmoid, which is several times as fast there as tanh.

0.5 x (1 + tanh(z / 2)) = x sigmoid(z), z = x (a + b x^2), a = sqrt(8 / pi), b = 0.044715 a.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_LINEAR = math.sqrt(8 / math.pi)
_CUBIC = 0.044715 * _LINEAR


def gelu(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """gelu(x), tanh form, in a new tensor, and what `gelu_backward` can use again; not differentiable."""
    if not _by_sigmoid(x):
        return F.gelu(x, approximate="tanh"), None
    sigmoid = torch.addcmul(x.new_tensor(_LINEAR), x, x, value=_CUBIC).mul_(x).sigmoid_()
    return sigmoid * x, sigmoid


def gelu_(x: Tensor, scratch: Tensor) -> Tensor:
    """gelu(x) in place of x; `scratch` has the shape of x and is overwritten."""
    if not _by_sigmoid(x):
        return torch.ops.aten.gelu_(x, approximate="tanh")
    sigmoid = torch.addcmul(x.new_tensor(_LINEAR), x, x, value=_CUBIC, out=scratch).mul_(x).sigmoid_()
    return x.mul_(sigmoid)


def gelu_backward(grad: Tensor, x: Tensor, result: tuple[Tensor, Tensor | None]) -> Tensor:
    """grad times the derivative of gelu at x, given `result = gelu(x)`; `grad` is used up."""
    active, sigmoid = result
    if sigmoid is None:
        return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    # (x s(z))' = s + x s (1 - s) z' = s + (active - active s) z'
    slope = torch.addcmul(x.new_tensor(_LINEAR), x, x, value=3 * _CUBIC)
    slope.mul_(torch.addcmul(active, active, sigmoid, value=-1)).add_(sigmoid)
    return grad.mul_(slope)


def _by_sigmoid(x: Tensor) -> bool:
    # Elsewhere one fused kernel is faster than several passes; in half precision they would round several times.
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
