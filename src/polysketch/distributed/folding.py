"""Sums whose order is fixed by the number of terms, not by who holds them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def folded(terms: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of the terms in pairs of neighbours, then pairs of pairs: ((a + b) + (c + d)).

    Ranks that each fold their own terms, and then fold their sums, add in the same order, where ranks and terms are
    powers of two. Terms of None are left out; None where there is no other.
    """
    level = list(terms)
    while len(level) > 1:
        pairs = [_sum(*level[at : at + 2]) for at in range(0, len(level) - 1, 2)]
        level = [*pairs, *level[2 * len(pairs) :]]
    return level[0] if level else None


def copies(module: nn.Module, count: int) -> list[dict[str, Tensor]]:
    """The parameters of a module so many times by name, for `torch.func.functional_call`.

    Each copy is the parameter itself. Gradients that come through the copies are folded in order.
    """
    by_name = {name: _Copies.apply(parameter, count) for name, parameter in module.named_parameters()}
    return [{name: each[number] for name, each in by_name.items()} for number in range(count)]


class _Copies(torch.autograd.Function):
    """A tensor `count` times; its gradient is the folded sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for _ in range(count))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        return folded(gradients), None


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
