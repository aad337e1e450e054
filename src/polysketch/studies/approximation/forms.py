"""The best linear maps of the outer products of tokens, whatever their factors: what LLOPS would reach without them."""

import torch
from torch import Tensor

from polysketch.evaluation import polynomial_weights
from polysketch.feature_maps import FeatureMap

__all__ = ["OptimalForms"]

_MORE = 64  # directions beside those that are kept, and turns of the iteration, for singular values that fall slowly
_TURNS = 6


class OptimalForms(FeatureMap):
    """Features that are any forms of degree p, fitted to some tokens: their truncated SVD, for new tokens too.

        A = (Q K^T)^p ~ U S V^T,    phi_Q(x) = (x K^T)^p V S^(-1/2),    phi_K(x) = (x Q^T)^p U S^(-1/2)

    These are the W* of LLOPS (Theorem 3.1) of least norm: on the tokens themselves phi_Q phi_K^T is U S V^T, the
    optimum; on others it tells what those tokens say of them (Nystroem's extension). Not a map to attend with: its cost
    grows with the tokens.

    Args:
        head_dim: width of one head.
        degree: p.
        num_features: m.
    """

    power = 1

    def __init__(self, head_dim: int, *, degree: int, num_features: int) -> None:
        super().__init__(head_dim)
        self.degree, self.feature_dim = degree, num_features
        for name in ("query_tokens", "key_tokens"):
            self.register_buffer(name, torch.zeros(num_features, head_dim))
        for name in ("query_coefficients", "key_coefficients"):
            self.register_buffer(name, torch.zeros(num_features, num_features))

    @torch.no_grad()
    def fit(self, query: Tensor, key: Tensor) -> None:
        """Take the SVD of these tokens: (queries, head_dim) and (keys, head_dim), at least `num_features` of each.

        Cost: 28 queries keys (num_features + 64) multiply-adds, by subspace iteration.
        """
        exact = polynomial_weights(query, key, self.degree)
        left, values, right = torch.svd_lowrank(exact, q=min(self.feature_dim + _MORE, *exact.shape), niter=_TURNS)
        left, values, right = (x[..., : self.feature_dim] for x in (left, values, right))
        self.query_tokens, self.key_tokens = query, key
        self.query_coefficients, self.key_coefficients = right / values.sqrt(), left / values.sqrt()

    def map_queries(self, x: Tensor) -> Tensor:
        """phi_Q."""
        return polynomial_weights(x, self.key_tokens, self.degree) @ self.query_coefficients

    def map_keys(self, x: Tensor) -> Tensor:
        """phi_K."""
        return polynomial_weights(x, self.query_tokens, self.degree) @ self.key_coefficients
