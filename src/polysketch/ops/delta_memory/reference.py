"""The definition of `delta_memory`: quadratic, plain PyTorch, differentiated by autograd; the oracle of the tests."""

import torch
from torch import Tensor

from polysketch.ops.delta_memory.types import Inputs


def recall(inputs: Inputs, size: int, sums: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What every query recalls, and what every token writes: one triangular system for all tokens.

    Args:
        inputs, size: as for `delta_memory`.
        sums: (batch, key_heads, size^2, value_dim), the memory before the first token; None for an empty one.
    """
    group = inputs.query_cells.shape[1] // inputs.key_cells.shape[1]
    key, query = dense(inputs.key_cells, inputs.key_weights, size), dense(*inputs[:2], size)
    strength, value = inputs.strength[..., None], inputs.value
    if sums is not None:
        value = value - _products(key) @ sums
    system = torch.eye(value.shape[2], dtype=value.dtype, device=value.device) + (strength * weights(key, key)).tril(-1)
    written = torch.linalg.solve_triangular(system, strength * value, upper=False, unitriangular=True)
    recalled = weights(query, key.repeat_interleave(group, 1)).tril() @ written.repeat_interleave(group, 1)
    if sums is not None:
        recalled = recalled + _products(query) @ sums.repeat_interleave(group, 1)
    return recalled, written


def dense(cells: Tensor, weights: Tensor, size: int) -> Tensor:
    """(..., 2 k) sparse vectors -> (..., 2, size); weights of one cell add up."""
    cells, weights = (x.unflatten(-1, (2, -1)) for x in (cells, weights))
    return weights.new_zeros(*weights.shape[:-1], size).scatter_add(-1, cells.long(), weights)


def weights(query: Tensor, key: Tensor) -> Tensor:
    """(..., n, 2, size) and (..., m, 2, size) -> (..., n, m): both vectors' products, multiplied."""
    return (query[..., 0, :] @ key[..., 0, :].mT) * (query[..., 1, :] @ key[..., 1, :].mT)


def _products(x: Tensor) -> Tensor:
    """(..., 2, size) -> (..., size^2)."""
    return (x[..., 0, :, None] * x[..., 1, None, :]).flatten(-2)
