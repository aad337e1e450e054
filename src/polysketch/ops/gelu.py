"""The tanh form of GELU and its derivative, on a CPU by the sigmoid, which is several times as fast there as tanh.

0.5 x (1 + tanh(z / 2)) = x sigmoid(z), z = sqrt(8 / pi) (x + 0.044715 x^3).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_LINEAR = math.sqrt(8 / math.pi)
_CUBIC = 0.044715 * _LINEAR


def gelu(x: Tensor) -> Tensor:
    """gelu(x), tanh form, in a new tensor; not differentiable where the sigmoid is used."""
    return _sigmoid(x).mul_(x) if _by_sigmoid(x) else F.gelu(x, approximate="tanh")


def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """grad times the derivative of gelu at x, in a new tensor."""
    if not _by_sigmoid(x):
        return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    sigmoid = _sigmoid(x)
    slope = (x * x).mul_(3 * _CUBIC).add_(_LINEAR).mul_(x).mul_(sigmoid)  # z' x sigmoid(z)
    return slope.addcmul_(slope, sigmoid, value=-1).add_(sigmoid).mul_(grad)


def _by_sigmoid(x: Tensor) -> bool:
    # Elsewhere one fused kernel is faster than six passes; in half precision they would round six times.
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def _sigmoid(x: Tensor) -> Tensor:
    """sigmoid(z(x)), in passes over one tensor that stays in cache."""
    return (x * x).mul_(_CUBIC).add_(_LINEAR).mul_(x).sigmoid_()
