"""The definition of `heavy_correction`: quadratic, plain PyTorch; the oracle of the tests."""

import torch
from torch import Tensor


def heavy_correction(
    query: Tensor,
    key: Tensor,
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    *,
    query_codes: Tensor,
    key_codes: Tensor,
    before: Tensor,
    after: Tensor | None = None,
    degree: int = 4,
    size: int = 64,
) -> Tensor:
    """c_i = sum over j in C_i of ((q_i . k_j)^degree - (phi(q_i) . phi(k_j))^2) v_j; arguments as of the op."""
    group = query.shape[1] // key.shape[1]
    key, key_features, value = (x.repeat_interleave(group, 1) for x in (key, key_features, value))
    weights = (query @ key.mT) ** degree - (query_features @ key_features.mT) ** 2
    return (weights * candidates(query_codes, key_codes, before, after, size)) @ value


def candidates(
    query_codes: Tensor, key_codes: Tensor, before: Tensor, after: Tensor | None = None, size: int = 64
) -> Tensor:
    """(batch, heads, queries, keys) bool: j is in C_i."""
    key_codes = key_codes.repeat_interleave(query_codes.shape[1] // key_codes.shape[1], 1)
    same, index = query_codes[..., :, None] == key_codes[..., None, :], torch.arange(key_codes.shape[2])
    earlier = same & (index < before[:, None, :, None])
    chosen = earlier & (earlier.flip(-1).cumsum(-1).flip(-1) <= size)
    if after is None:
        return chosen
    later = same & (index >= after[:, None, :, None])
    return chosen | (later & (later.cumsum(-1) <= size))
