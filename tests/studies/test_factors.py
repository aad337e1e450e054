"""The error of cutting the optimal sketch down to products of projections (LLOPS, theorem 3.4)."""

import pytest
import torch
from torch import Tensor

from polysketch import evaluation
from polysketch.studies.approximation.factors import factor_error

HEAD_DIM = 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("num_features", [1, 4, 9])
def test_at_degree_two_the_factor_error_is_that_of_largest_singular_values(num_features: int):
    """W* made by a pseudo-inverse, its columns as matrices."""
    query, key = draw(30, HEAD_DIM), draw(25, HEAD_DIM, seed=1)
    found = factor_error(query, key, 2, num_features)
    features = evaluation.optimal_features(evaluation.polynomial_weights(query, key, 2), num_features)
    for x, target, error in zip((query, key), features, found, strict=True):
        outer = (x[:, :, None] * x[:, None, :]).flatten(1)
        columns = (torch.linalg.pinv(outer) @ target).T.unflatten(1, (HEAD_DIM, HEAD_DIM))
        largest = torch.linalg.matrix_norm(columns, ord=2).square().sum()
        assert error == pytest.approx(float(1 - largest / columns.square().sum()), abs=1e-6)
    assert num_features == 1 or found[0] > 0.01


def test_at_degree_three_the_factor_error_is_below_that_of_any_unit_vectors():
    query, key = draw(30, HEAD_DIM), draw(25, HEAD_DIM, seed=1)
    found = factor_error(query, key, 3, 2)[0]
    target = evaluation.optimal_features(evaluation.polynomial_weights(query, key, 3), 2)[0]
    outer = torch.einsum("na,nb,nc->nabc", query, query, query).flatten(1)
    columns = (torch.linalg.pinv(outer) @ target).T
    units = torch.nn.functional.normalize(draw(3, 20_000, HEAD_DIM, seed=5), dim=-1)
    tried = torch.einsum("na,nb,nc->nabc", *units).flatten(1) @ columns.T
    best = float(1 - tried.abs().amax(0).square().sum() / columns.square().sum())
    assert best - 0.25 < found < best


@pytest.mark.parametrize("degree", [2, 3])
def test_nothing_is_lost_where_the_optimal_columns_are_products(degree: int):
    """Of one entry there is one monomial."""
    assert max(factor_error(draw(9, 1), draw(7, 1, seed=1), degree, 1)) < 1e-9
