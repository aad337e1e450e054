"""What is lost when the optimal sketch is cut down to products of projections (LLOPS, Theorem 3.4)."""

import torch
from torch import Tensor

from polysketch.evaluation import optimal_features, polynomial_weights

__all__ = ["factor_error"]

_SINGULAR = 1e-12


def factor_error(
    query: Tensor, key: Tensor, degree: int, num_features: int, *, starts: int = 4, iterations: int = 50, seed: int = 0
) -> tuple[float, float]:
    """min |W* - Theta_1 (.) ... (.) Theta_p|_F^2 / |W*|_F^2 = 1 - sum_i tau_i^2 / |W*|_F^2, for queries and for keys.

    W* is the optimal projection of Theorem 3.1, psi(Q) W* = U S^(1/2), the one of least norm of those that are optimal;
    psi(x) = vec(x (x) ... (x) x). tau_i is the largest <W*_i, u_1 (x) ... (x) u_p> over unit vectors, found by turns
    from several starts: what is found may be below the largest, and the error above the theorem's.

    The theorem is about the projection, not about the weights, and about one projection among many: the error of
    weights that fitted factors reach may be far smaller than it lets expect.

    Args:
        query: (queries, head_dim).
        key: (keys, head_dim).
        degree: p.
        num_features: m, at most the smaller number of tokens.
        starts: random starts for each feature.
        iterations: of all p vectors in turn.
        seed: of the starts.

    Returns:
        For queries and for keys, in [0, 1]; 0 where every column is a product of one vector for each factor.

    Cost: an SVD of queries x keys, an eigendecomposition of tokens x tokens for each, and starts iterations p tokens
    (head_dim + p) num_features multiply-adds. W* itself, head_dim^p x m, is never made.
    """
    query, key = query.double(), key.double()
    features = optimal_features(polynomial_weights(query, key, degree), num_features)
    generator = torch.Generator().manual_seed(seed)
    errors = [
        _relative_error(x, target, degree, starts, iterations, generator)
        for x, target in zip((query, key), features, strict=True)
    ]
    return errors[0], errors[1]


def _relative_error(
    x: Tensor, features: Tensor, degree: int, starts: int, iterations: int, generator: torch.Generator
) -> float:
    """Columns W_i = sum_a C_ai x_a^(x)p with K C = features, K = (X X^T)^p: |W_i|^2 = C_i . K C_i."""
    values, vectors = torch.linalg.eigh(polynomial_weights(x, x, degree))
    kept = values > _SINGULAR * values[-1]
    coefficients = vectors[:, kept] @ ((vectors[:, kept].mT @ features) / values[kept, None])
    total = (coefficients * features).sum()
    best = features.new_zeros(features.shape[1])
    for _ in range(starts):
        best = torch.maximum(best, _by_turns(x, coefficients, degree, iterations, generator).square())
    return float((1 - best.sum() / total).clamp(0, 1))


def _by_turns(x: Tensor, coefficients: Tensor, degree: int, iterations: int, generator: torch.Generator) -> Tensor:
    """<W_i, u_1 (x) ... (x) u_p> for every i after improving u_1, ..., u_p in turn: (features,)."""
    shape = (x.shape[1], coefficients.shape[1])
    units = [_unit(torch.randn(shape, generator=generator, dtype=x.dtype).to(x.device)) for _ in range(degree)]
    found = coefficients.new_zeros(shape[1])
    for _ in range(iterations):
        for place in range(degree):
            contracted = coefficients
            for other in units[:place] + units[place + 1 :]:
                contracted = contracted * (x @ other)
            gradient = x.mT @ contracted
            found, units[place] = gradient.norm(dim=0), _unit(gradient)
    return found


def _unit(columns: Tensor) -> Tensor:
    return columns / columns.norm(dim=0).clamp(min=1e-300)
