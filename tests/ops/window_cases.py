"""Inputs of attention to nearby tokens, the weighted mean by its definition, and comparisons."""

from collections.abc import Callable

import torch
from torch import Tensor

TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}
LENGTHS = [1, 2, 63, 65, 300]


def tensors(length=37, batch=2, heads=4, key_heads=2, head_dim=8, value_dim=5, seed=0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, length, head_dim), (key_heads, length, head_dim), (key_heads, length, value_dim)]
    return [torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def padding(length: int) -> Tensor:
    """The second row starts late and has a masked token in its middle."""
    mask = torch.arange(length) >= torch.tensor([0, min(5, length - 1)])[:, None]
    mask[1, length // 2] = False
    return mask


def weighted(weights: Tensor, allowed: Tensor, value: Tensor, offset: float) -> Tensor:
    """sum_j w_ij v_j / (offset + sum_j w_ij) over what is allowed; zeros where nothing is."""
    weights = torch.where(allowed, weights, 0.0)
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
    mass = offset + weights.sum(-1, keepdim=True)
    return weights @ value / mass.masked_fill(mass == 0, 1.0)


def scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT


def assert_same_with_gradients(compute, expect, inputs: list[Tensor]) -> None:
    inputs = [x.requires_grad_() for x in inputs]
    results = [function(*inputs) for function in (compute, expect)]
    torch.testing.assert_close(*results, **TOLERANCE)
    upstream = torch.randn(results[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(result, inputs, upstream) for result in results]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


def assert_no_matrix_of_all_pairs(attend: Callable[[], Tensor], length: int) -> None:
    """A mask of all pairs would be four times what is allowed."""
    with torch.profiler.profile(profile_memory=True) as profile:
        attend()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < length * length / 4
