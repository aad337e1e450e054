"""Custom operators of PyTorch that refuse forward-mode derivatives, which PyTorch's own drop without a word.

An operator of `torch.library.custom_op` has a backward formula and no forward one. Given a number with a tangent, as
under `torch.func.jvp`, it computes with the number and leaves the tangent out: the derivative would be that of another
function. PyTorch's operators raise there, and so do these.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

try:
    from torch.utils._python_dispatch import _get_current_dispatch_mode as current_mode
except ImportError:  # not public; without it no operator's call is spared
    current_mode = None  # type: ignore[assignment]


class Operator:
    """An operator, called with its arguments in order.

    Attributes:
        name: "polysketch::" and the operator's.
        compute: what it computes with, a plain function.
    """

    def __init__(
        self, name: str, compute: Callable[..., Any], mutates_args: Sequence[str] = (), schema: str | None = None
    ) -> None:
        definition: Any = torch.library.custom_op(name, mutates_args=mutates_args, schema=schema)(compute)
        self.name, self.compute = name, compute
        OPERATORS[name] = self
        self.register_fake = definition.register_fake
        self.register_autograd = definition.register_autograd
        self._definition = definition

    def __call__(self, *arguments: Any) -> Any:
        refuse_tangents(self.name, *arguments)
        return self._definition(*arguments)


OPERATORS: dict[str, Operator] = {}
"""Every operator of ours whose module is imported, by name."""


def custom_op(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Operator]:
    """As `torch.library.custom_op(name, mutates_args=(), schema=schema)`; its calls refuse tensors with tangents.

    Calls by `torch.ops` are PyTorch's own and do not.
    """
    return lambda compute: Operator(name, compute, schema=schema)


def refuse_tangents(name: str, *arguments: Any) -> None:
    """Refuse tensors with tangents, also in lists.

    Raises:
        NotImplementedError: naming what has no forward-mode derivative.
    """
    for argument in arguments:
        if isinstance(argument, Tensor):
            unpacked = forward_ad.unpack_dual(argument)
            if unpacked.primal is argument:  # outside of forward mode nothing is unpacked: no tensor has a tangent
                return
            if unpacked.tangent is not None:
                raise NotImplementedError(
                    f"{name} has no forward-mode derivative, got a tensor with a tangent; is torch.func.jvp or jacfwd"
                    " around it? backward() and torch.autograd.grad work"
                )
        elif isinstance(argument, list | tuple):
            refuse_tangents(name, *argument)


def nothing_looks_on(x: Tensor) -> bool:
    """Whether there is neither a gradient to take nor a tool that traces or counts.

    An operator's call, which takes as long as a small computation, can then be spared.
    """
    if current_mode is None or type(x) is not Tensor or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return current_mode() is None and not torch.is_autocast_enabled(x.device.type)
