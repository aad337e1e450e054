"""The functions between the matrices of the learned sketch's networks, in plain PyTorch."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.gelu import gelu, gelu_, gelu_backward


class Activation(NamedTuple):
    """A function of every number by itself.

    Attributes:
        formula: the definition, differentiable.
        apply: the result in a new tensor, and what `backward` can use again; not differentiable.
        apply_: the result in place; a second tensor of the same shape is overwritten.
        backward: of a gradient, which is used up, x, and what `apply` gave: the gradient of x.
    """

    formula: Callable[[Tensor], Tensor]
    apply: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    apply_: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, tuple[Tensor, Tensor | None]], Tensor]


ACTIVATIONS = {
    "gelu": Activation(partial(F.gelu, approximate="tanh"), gelu, gelu_, gelu_backward),
    "relu": Activation(
        F.relu,
        lambda x: (torch.relu(x), None),
        lambda x, _: x.relu_(),
        lambda grad, x, _: torch.ops.aten.threshold_backward(grad, x, 0),
    ),
    "silu": Activation(
        F.silu,
        lambda x: (F.silu(x), None),
        lambda x, _: F.silu(x, inplace=True),
        lambda grad, x, _: torch.ops.aten.silu_backward(grad, x),
    ),
}
"""By name; "gelu", in its tanh form, is the paper's."""


def check_activation(activation: str) -> None:
    """Refuse what is not in the table.

    Raises:
        ValueError: an unknown activation; the message lists those that exist.
    """
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known activations: {', '.join(ACTIVATIONS)}")
