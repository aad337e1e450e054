"""The best that any feature map can do on given queries and keys: the truncated SVD (LLOPS, Theorem 3.1)."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["optimal_features", "optimal_frobenius_error"]


def optimal_frobenius_error(exact: Tensor, ranks: Sequence[int]) -> Tensor:
    """The least relative Frobenius error of any matrix of each rank: sqrt(sum_{i > m} sigma_i^2 / sum_i sigma_i^2).

    m features have products of rank m at most, so that no map of m features has a smaller error on these very queries
    and keys. It is not a map: from as many features as tokens on its error is zero, whatever comes after these tokens.

    Args:
        exact: weights (..., queries, keys).
        ranks: the numbers of features m, 0 or more.

    Returns:
        (..., len(ranks)) float64.

    Raises:
        ValueError: a negative rank, or weights of no pair.

    Cost: the singular values, of the order queries keys min(queries, keys), in float64.
    """
    if any(rank < 0 for rank in ranks):
        raise ValueError(f"expected ranks of at least 0, found {list(ranks)}")
    if exact.dim() < 2 or not exact.shape[-1] or not exact.shape[-2]:
        raise ValueError(f"expected weights (..., queries, keys), found the shape {tuple(exact.shape)}")
    energies = torch.linalg.svdvals(exact.double()).square()
    tails = energies.flip(-1).cumsum(-1).flip(-1)
    tails = torch.cat([tails, torch.zeros_like(tails[..., :1])], -1)
    kept = torch.tensor([min(rank, energies.shape[-1]) for rank in ranks], dtype=torch.int64, device=exact.device)
    return (tails[..., kept] / tails[..., :1]).sqrt()


def optimal_features(exact: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Query and key features whose products are the nearest matrix of this rank: U S^(1/2) and V S^(1/2).

    Args:
        exact: weights (..., queries, keys).
        rank: m, at most the smaller side.

    Returns:
        (..., queries, m) and (..., keys, m) float64.
    """
    left, values, right = torch.linalg.svd(exact.double(), full_matrices=False)
    root = values[..., None, :rank].sqrt()
    return left[..., :rank] * root, right.mT[..., :rank] * root
