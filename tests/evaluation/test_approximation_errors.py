"""Errors of weights and outputs: against formulas written out, and against the optimum no map can beat."""

import pytest
import torch
from torch import Tensor

from polysketch import evaluation
from polysketch.feature_maps import Elementwise, GaussianSketch, Hedgehog, LowRankSketch, PerformerFeatures, Taylor

QUERIES, KEYS, HEAD_DIM = 7, 5, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs() -> tuple[Tensor, Tensor]:
    """Approximated and exact weights of two heads."""
    return draw(2, QUERIES, KEYS, seed=1), draw(2, QUERIES, KEYS, seed=2)


def test_the_relative_frobenius_error_is_a_ratio_of_root_sums_of_squares():
    approximated, exact = pairs()
    for head, found in enumerate(evaluation.relative_frobenius_error(approximated, exact)):
        difference = sum((a - b) ** 2 for a, b in zip(approximated[head].flatten(), exact[head].flatten(), strict=True))
        torch.testing.assert_close(found, (difference / (exact[head] ** 2).sum()).sqrt())


@pytest.mark.parametrize("degree", [2, 4])
def test_the_sketch_error_is_the_epsilon_of_the_theorem(degree: int):
    """sum |w~ - w|^2 = eps^2 sum_ij |q_i|^2p |k_j|^2p."""
    query, key, approximated = draw(2, QUERIES, HEAD_DIM), draw(2, KEYS, HEAD_DIM, seed=3), pairs()[0]
    exact = evaluation.polynomial_weights(query, key, degree)
    found = evaluation.sketch_error(approximated, exact, query, key, degree)
    for head in (0, 1):
        bound = sum((q @ q) ** degree * (k @ k) ** degree for q, k in ((q, k) for q in query[head] for k in key[head]))
        difference = (approximated[head] - (query[head] @ key[head].T) ** degree).square().sum()
        torch.testing.assert_close(found[head] ** 2 * bound, difference)


def test_the_relative_absolute_errors_are_a_mean_and_a_median_of_ratios_and_a_ratio_of_means():
    approximated, exact = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[2.0, -2.0, 10.0]])
    assert evaluation.relative_mean_absolute_error(approximated, exact) == pytest.approx((0.5 + 2 + 0.1) / 3)
    assert evaluation.median_relative_error(approximated, exact) == pytest.approx(0.5)
    assert evaluation.mean_absolute_error_ratio(approximated, exact) == pytest.approx((1 + 4 + 1) / 14)


def test_a_pair_whose_weight_is_zero_has_no_relative_error():
    with pytest.raises(ValueError, match="expected exact weights other than zero"):
        evaluation.relative_mean_absolute_error(torch.ones(2, 2), torch.eye(2))


@pytest.mark.parametrize(
    "error",
    [
        evaluation.relative_frobenius_error,
        evaluation.relative_mean_absolute_error,
        evaluation.median_relative_error,
        evaluation.mean_absolute_error_ratio,
    ],
)
def test_no_weights_at_all_have_an_error_of_one_and_no_shape_is_broadcast(error):
    exact = pairs()[1]
    torch.testing.assert_close(error(torch.zeros_like(exact), exact), torch.ones(2, dtype=torch.float64))
    assert (error(exact, exact) == 0).all()
    with pytest.raises(ValueError, match="of one shape"):
        error(exact[:, :1], exact)


@pytest.mark.parametrize("rank", [0, 1, 3, 5, 9])
def test_the_optimum_is_the_error_of_the_optimal_features(rank: int):
    exact = pairs()[1]
    query_features, key_features = evaluation.optimal_features(exact, rank)
    assert query_features.shape == (2, QUERIES, min(rank, KEYS))
    error = evaluation.relative_frobenius_error(query_features @ key_features.mT, exact)
    torch.testing.assert_close(evaluation.optimal_frobenius_error(exact, [rank])[:, 0], error, atol=1e-14, rtol=1e-9)


@pytest.mark.parametrize("kind", [LowRankSketch, GaussianSketch, PerformerFeatures, Hedgehog, Taylor, Elementwise])
def test_no_map_of_as_many_features_is_better_than_the_optimum(kind: type):
    """Whatever its scale: the scale that suits it best is given to it."""
    torch.manual_seed(0)
    feature_map = kind(HEAD_DIM).double()
    query, key = draw(1, 1, 40, HEAD_DIM), draw(1, 1, 40, HEAD_DIM, seed=3)
    exact = evaluation.polynomial_weights(query, key, 6)  # of rank 28, the monomials of degree 6
    features = min(feature_map.feature_dim, 8)
    products = feature_map.map_queries(query)[..., :features] @ feature_map.map_keys(key)[..., :features].mT
    products = products * ((products * exact).sum() / products.square().sum())
    optimum = evaluation.optimal_frobenius_error(exact, [features])[..., 0]
    assert optimum > 1e-3
    assert (evaluation.relative_frobenius_error(products, exact) >= optimum).all()


def test_the_power_of_products_has_the_rank_of_its_monomials():
    """Degree 3 of 3 entries: 10 monomials, so that 10 features suffice and 9 do not."""
    exact = evaluation.polynomial_weights(draw(40, HEAD_DIM), draw(40, HEAD_DIM, seed=3), 3)
    nine, ten = evaluation.optimal_frobenius_error(exact, [9, 10])
    assert nine > 1e-4
    assert ten < 1e-12


def test_a_negative_rank_is_refused():
    with pytest.raises(ValueError, match="ranks of at least 0"):
        evaluation.optimal_frobenius_error(torch.eye(2), [-1])


def test_operator_norms_are_largest_singular_values():
    weights, value = draw(2, QUERIES, KEYS).softmax(-1), draw(2, KEYS, HEAD_DIM, seed=3)
    exact, approximated = weights @ value, draw(2, QUERIES, HEAD_DIM, seed=4)

    def norm(matrix: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(matrix.mT @ matrix)[..., -1].sqrt()

    torch.testing.assert_close(evaluation.operator_norm(weights), norm(weights))
    expected = norm(approximated - exact) / (norm(weights) * norm(value))
    torch.testing.assert_close(evaluation.operator_norm_error(approximated, exact, weights, value), expected)


def test_alpha_is_the_longest_column_times_the_length():
    weights = draw(QUERIES, KEYS).softmax(-1)
    lengths = [sum(float(weights[i, j]) ** 2 for i in range(QUERIES)) for j in range(KEYS)]
    assert float(evaluation.column_alpha(weights)) == pytest.approx(QUERIES * max(lengths))
    assert float(evaluation.column_alpha(weights, times_length=False)) == pytest.approx(max(lengths))
    assert float(evaluation.column_alpha(weights, skip_columns=3)) == pytest.approx(QUERIES * max(lengths[3:]))


def test_alpha_is_one_for_even_attention_and_the_square_of_the_length_for_a_sink():
    assert float(evaluation.column_alpha(torch.full((6, 6), 1 / 6))) == pytest.approx(1)
    sink = torch.zeros(6, 6)
    sink[:, 0] = 1
    assert float(evaluation.column_alpha(sink)) == 36
    assert float(evaluation.column_alpha(sink, skip_columns=1)) == 0
    with pytest.raises(ValueError, match="skip_columns from 0 to 5, found 6"):
        evaluation.column_alpha(sink, skip_columns=6)


def test_the_mass_beyond_a_window_is_that_counted_by_hand():
    """Rows 2 and 3 have keys two or more tokens back: shares of 1/4 and (3 + 1) / 8."""
    weights = torch.tensor([[9.0, 5.0, 5.0, 5.0], [1.0, 1.0, 5.0, 5.0], [1.0, 1.0, 2.0, 5.0], [3.0, -1.0, 2.0, 2.0]])
    assert float(evaluation.mass_beyond_window(weights, 2)) == pytest.approx((1 / 4 + 4 / 8) / 2)
    assert float(evaluation.mass_beyond_window(weights, 3)) == pytest.approx(3 / 8)
    both_sides = [10 / 24, 5 / 12, 1 / 9, 4 / 8]
    assert float(evaluation.mass_beyond_window(weights, 2, causal=False)) == pytest.approx(sum(both_sides) / 4)


def test_a_query_without_weight_has_no_share_beyond():
    assert float(evaluation.mass_beyond_window(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), 1)) == 0


@pytest.mark.parametrize("window", [0, 4])
def test_a_window_that_nothing_is_beyond_is_refused(window: int):
    with pytest.raises(ValueError, match="window from 1 to 3 for 4 tokens"):
        evaluation.mass_beyond_window(torch.ones(4, 4), window)
