"""Fitting maps to powers of products, and what Theorem 3.4 says is lost."""

import pytest
import torch
from torch import Tensor

from polysketch import evaluation
from polysketch.evaluation.approximation.fitting import KernelLoss
from polysketch.feature_maps import GaussianSketch, LearnedSketch, LowRankSketch

HEAD_DIM = 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def low_rank(degree: int = 2, num_features: int = 24, head_dim: int = HEAD_DIM) -> LowRankSketch:
    torch.manual_seed(0)
    made = LowRankSketch(head_dim, degree=degree, num_features=num_features).double()
    for factors in made.parameters():
        factors.data.mul_(head_dim**0.5)  # unbiased for the power of the product
    return made


@torch.no_grad()
def error(feature_map, query: Tensor, key: Tensor, degree: int) -> float:
    weights = evaluation.feature_weights(feature_map, query[None, None], key[None, None])[0, 0]
    return float(evaluation.relative_frobenius_error(weights, evaluation.polynomial_weights(query, key, degree)))


@pytest.mark.parametrize("degree", [2, 3])
def test_a_map_with_features_enough_is_fitted_to_the_kernel_itself(degree: int):
    """Also on vectors that it was not fitted to."""
    made = low_rank(degree, 60)
    query, key = draw(300, HEAD_DIM), draw(200, HEAD_DIM, seed=1)
    scale = evaluation.common_scale(query, key)
    before = error(made, query / scale, key / scale, degree)
    losses = evaluation.fit_feature_map(made, query / scale, key / scale, degree=degree, steps=400, batch_size=100)
    assert before > 0.5
    assert error(made, query / scale, key / scale, degree) < 0.03
    assert error(made, draw(50, HEAD_DIM, seed=3) / scale, draw(60, HEAD_DIM, seed=4) / scale, degree) < 0.05
    assert losses[-1] < 1e-3 < 0.2 < losses[0]


def test_a_fitted_map_of_few_features_nears_the_optimum_and_never_passes_it():
    made, query, key = low_rank(2, 5), draw(80, HEAD_DIM), draw(80, HEAD_DIM, seed=1)
    evaluation.fit_feature_map(made, query, key, degree=2, steps=300)
    optimum = float(evaluation.optimal_frobenius_error(evaluation.polynomial_weights(query, key, 2), [5]))
    assert optimum < error(made, query, key, 2) < 2 * optimum


@pytest.mark.parametrize("degree", [2, 3])
def test_the_loss_and_its_gradients_are_those_of_the_sum_over_all_pairs(degree: int):
    made, query, key = low_rank(degree, 7), draw(1, 1, 11, HEAD_DIM), draw(1, 1, 9, HEAD_DIM, seed=1)
    made.key_factors.data.mul_(1.5)  # queries and keys have factors of their own
    exact = evaluation.polynomial_weights(query, key, degree)
    plain = (evaluation.feature_weights(made, query, key) - exact).square().sum() / exact.square().sum()
    by_grams = KernelLoss.apply(made.map_queries(query), made.map_keys(key), exact)
    torch.testing.assert_close(by_grams, plain)
    expected, found = (torch.autograd.grad(3 * loss, list(made.parameters())) for loss in (plain, by_grams))
    torch.testing.assert_close(found, expected)


def test_a_kernel_of_few_directions_is_found_exactly_by_as_many_features():
    """Of two directions (q . k)^2 has three monomials, of products each: the optimum is zero, and so is the fit's."""
    plane = draw(2, HEAD_DIM, seed=7)
    query, key = draw(120, 2) @ plane, draw(100, 2, seed=1) @ plane
    scale = evaluation.common_scale(query, key)
    made = low_rank(2, 3)
    evaluation.fit_feature_map(made, query / scale, key / scale, degree=2, steps=400, batch_size=100)
    assert error(made, query / scale, key / scale, 2) < 0.01


def test_a_power_two_map_is_fitted_by_its_squared_products():
    torch.manual_seed(0)
    made, query, key = LearnedSketch(HEAD_DIM, sketch_size=6).double(), draw(60, HEAD_DIM), draw(60, HEAD_DIM, seed=1)
    scale = evaluation.common_scale(query, key)
    before = error(made, query / scale, key / scale, 4)
    evaluation.fit_feature_map(made, query / scale, key / scale, degree=4, steps=60, learning_rate=0.05)
    assert error(made, query / scale, key / scale, 4) < min(0.9, before)


def test_a_seed_gives_the_fit():
    found = []
    for seed in (0, 0, 1):
        made = low_rank()
        evaluation.fit_feature_map(
            made, draw(90, HEAD_DIM), draw(90, HEAD_DIM, seed=1), degree=2, steps=5, batch_size=20, seed=seed
        )
        found.append(made.query_factors.detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_common_scale_gives_products_a_mean_square_of_one():
    query, key = 5 * draw(30, HEAD_DIM), draw(20, HEAD_DIM, seed=1) + 2
    scale = evaluation.common_scale(query, key)
    assert float(((query / scale) @ (key / scale).T).square().mean()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("made", "changes", "message"),
    [
        (GaussianSketch(HEAD_DIM), {}, "GaussianSketch has no parameters to fit"),
        (low_rank(), {"steps": 0}, "steps of at least 1, found 0"),
        (low_rank(), {"batch_size": 0}, "batch_size of at least 1"),
        (low_rank(), {"learning_rate": 1e200}, "the fit diverged"),
    ],
)
def test_what_cannot_be_fitted_is_refused(made, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        evaluation.fit_feature_map(made, draw(9, HEAD_DIM), draw(9, HEAD_DIM), degree=2, **{"steps": 3, **changes})
