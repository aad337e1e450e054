"""Attention of nothing: a batch without rows, or sequences without tokens, as PyTorch has it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def of_nothing(query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """What attention gives where there is no row, or no token that asks.

    Args:
        query, key, value: as for `Mechanism.forward`, or of another sequence, which may have tokens.

    Returns:
        (batch, num_heads, length, value_dim) without entries, through which a gradient passes; None where there is
        something to attend to, or where shapes are wrong.
    """
    tensors = (query, key, value)
    if any(tensor.dim() != 4 for tensor in tensors):
        return None
    if query.shape[2] and any(tensor.shape[0] for tensor in tensors):
        return None
    output = value.new_zeros(*query.shape[:3], value.shape[3])
    return output + sum((tensor.sum() * 0 for tensor in tensors), value.new_zeros(())).to(value.dtype)


def forward_of_nothing(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A mechanism's `forward`, which is called only where there is something to attend to."""

    @functools.wraps(forward)
    def with_nothing(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **given: Any) -> Tensor:
        output = None if _has_entries(query) else of_nothing(query, key, value)
        if output is None:
            return forward(self, query, key, value, *args, **given)
        self.check_inputs(query, key, value)
        return output

    return with_nothing


def extend_of_nothing(extend: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """A mechanism's `extend`, which leaves the state as it is where no token is new; no gradient."""
    return _moved_by_tokens(extend, torch.Tensor.detach)


def span_of_nothing(forward_span: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """A mechanism's `forward_span`, which leaves the state as it is where the span has no token."""
    return _moved_by_tokens(forward_span, lambda output: output)


def _moved_by_tokens(
    move: Callable[..., tuple[Tensor, Any]], finish: Callable[[Tensor], Tensor]
) -> Callable[..., tuple[Tensor, Any]]:
    @functools.wraps(move)
    def with_nothing(
        self: Any, query: Tensor, key: Tensor, value: Tensor, state: Any, *args: Any, **given: Any
    ) -> tuple[Tensor, Any]:
        output = None if _has_entries(query) else of_nothing(query, key, value)
        if output is None or key.shape[2]:  # tokens of no rows are counted by the state
            return move(self, query, key, value, state, *args, **given)
        self.check_inputs(query, key, value)
        return finish(output), state

    return with_nothing


def _has_entries(query: Any) -> bool:
    """Whether there is something for sure: the first thing that is asked in every call."""
    return not isinstance(query, torch.Tensor) or query.numel() > 0
