"""The learned low-rank sketch: its definition, its start, and the maps it has as special cases."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from polysketch.feature_maps import GaussianSketch, LowRankSketch

HEAD_DIM, FEATURES = 6, 5
DEGREES = (2, 3, 4, 6)


def sketch(degree: int, *, features: int = FEATURES, seed: int = 0, **options) -> LowRankSketch:
    """With factors of keys moved away from those of queries, where they start."""
    torch.manual_seed(seed)
    made = LowRankSketch(HEAD_DIM, degree=degree, num_features=features, **options).double()
    made.key_factors.data.add_(0.3 * torch.randn_like(made.key_factors))
    return made


def vectors(heads: int = 1, seed: int = 1) -> Tensor:
    return torch.randn(2, heads, 7, HEAD_DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outer_powers(x: Tensor, degree: int) -> Tensor:
    """vec(x (x) ... (x) x): (..., head_dim^degree)."""
    powers = x
    for _ in range(degree - 1):
        powers = (powers[..., :, None] * x[..., None, :]).flatten(-2)
    return powers


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("rank", [1, 3])
def test_features_are_linear_in_the_outer_power_with_kronecker_products_of_that_rank(degree: int, rank: int):
    """Theorem 3.2: W = sum_t of column-wise Kronecker products of the factors."""
    made, x = sketch(degree, rank=rank), vectors()
    for features, factors in ((made.map_queries(x), made.query_factors), (made.map_keys(x), made.key_factors)):
        products = []
        for term in factors[0]:
            product = term[0]
            for factor in term[1:]:
                product = (product[:, None] * factor[None]).flatten(0, 1)
            products.append(product)
        torch.testing.assert_close(features, outer_powers(x, degree) @ torch.stack(products).sum(0))


@pytest.mark.parametrize("degree", DEGREES)
def test_a_rank_is_a_sum_of_maps_of_rank_one(degree: int):
    made, x, total = sketch(degree, rank=3), vectors(), 0
    for term in range(3):
        single = sketch(degree, seed=9)
        single.query_factors.data.copy_(made.query_factors[:, term : term + 1])
        total = total + single.map_queries(x)
    torch.testing.assert_close(made.map_queries(x), total)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("rank", [1, 3])
def test_the_nonnegative_variant_squares_the_features(degree: int, rank: int):
    made, plain, x = sketch(degree, rank=rank, nonnegative=True), sketch(degree, rank=rank), vectors()
    plain.load_state_dict(made.state_dict())
    torch.testing.assert_close(made.map_queries(x), plain.map_queries(x).square())
    assert (made.map_queries(x) @ made.map_keys(vectors(seed=2)).mT >= 0).all()
    assert (plain.map_queries(x) @ plain.map_keys(vectors(seed=2)).mT < 0).any()


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("nonnegative", [False, True])
def test_the_degree_of_weights_in_the_query_is_p_or_twice_p(degree: int, nonnegative: bool):
    made, x = sketch(degree, nonnegative=nonnegative), vectors()
    total = 2 * degree if nonnegative else degree
    torch.testing.assert_close(made.map_queries(-1.5 * x), (-1.5) ** total * made.map_queries(x))


def test_queries_and_keys_have_factors_of_their_own_for_each_head():
    made, x = sketch(4, num_kv_heads=2, share="head"), vectors(1).expand(-1, 2, -1, -1)
    found = [made.map_queries(x)[:, 0], made.map_queries(x)[:, 1], made.map_keys(x)[:, 0], made.map_keys(x)[:, 1]]
    assert all(not torch.allclose(first, second) for first, second in pairwise(found))
    for head in (0, 1):
        expected = (x[:, head, None] @ made.key_factors[head, 0]).prod(1)
        torch.testing.assert_close(made.map_keys(x)[:, head], expected)


def test_equal_factors_give_elementwise_powers():
    made, x = sketch(3), vectors()
    made.query_factors.data[:] = made.query_factors.data[:, :, :1]
    torch.testing.assert_close(made.map_queries(x), (x @ made.query_factors[0, 0, 0]) ** 3)


def test_repeated_and_tiled_projections_give_the_quadratic_term_of_based():
    """Theta_1 repeats the columns of W, Theta_2 tiles them: m = width^2 features, whose products are (Wq . Wk)^2."""
    width, query, key = 3, vectors(), vectors(seed=2)
    torch.manual_seed(0)
    projections = torch.randn(2, HEAD_DIM, width, dtype=torch.float64)
    made = sketch(2, features=width**2)
    for factors, projection in zip((made.query_factors, made.key_factors), projections, strict=True):
        factors.data[0, 0, 0] = projection.repeat_interleave(width, 1)
        factors.data[0, 0, 1] = projection.repeat(1, width)
    torch.testing.assert_close(made.map_queries(query), outer_powers(query @ projections[0], 2))
    exact = ((query @ projections[0]) @ (key @ projections[1]).mT) ** 2
    torch.testing.assert_close(made.map_queries(query) @ made.map_keys(key).mT, exact)


def test_shared_gaussian_factors_give_the_random_sketch_of_degree_two():
    """PolySketchFormer's features for weights of degree 4, before the op squares their products."""
    torch.manual_seed(0)
    random, made = GaussianSketch(HEAD_DIM, degree=4, sketch_size=FEATURES).double(), sketch(2)
    for factors in (made.query_factors, made.key_factors):
        factors.data[:, 0] = random.matrices(0) * FEATURES**-0.25
    torch.testing.assert_close(made.map_queries(vectors()), random.map_queries(vectors()))
    torch.testing.assert_close(made.map_keys(vectors()), random.map_keys(vectors()))


@pytest.mark.parametrize(("degree", "rank"), [(2, 1), (3, 1), (2, 3), (4, 1)])
def test_at_the_start_weights_are_an_unbiased_sketch_of_the_power_of_the_scaled_product(degree: int, rank: int):
    draws, cosine = 4000, 0.9
    query, key = torch.zeros(2, HEAD_DIM, dtype=torch.float64)
    query[0], key[0], key[1] = HEAD_DIM**0.5, cosine * HEAD_DIM**0.5, ((1 - cosine**2) * HEAD_DIM) ** 0.5
    torch.manual_seed(0)
    made = LowRankSketch(HEAD_DIM, degree=degree, num_features=40, rank=rank, num_kv_heads=draws, share="head").double()
    assert torch.equal(made.query_factors, made.key_factors)
    both = torch.stack([query, key]).expand(1, draws, 2, HEAD_DIM)
    found = (made.map_queries(both)[0, :, 0] * made.map_keys(both)[0, :, 1]).sum(-1)
    standard_error = found.std() / draws**0.5
    assert standard_error < 0.05
    assert abs(found.mean() - cosine**degree) < 4 * standard_error


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("rank", [1, 3])
def test_at_the_start_a_typical_nonnegative_weight_is_one(degree: int, rank: int):
    torch.manual_seed(0)
    made = LowRankSketch(64, degree=degree, num_features=512, rank=rank, nonnegative=True)
    query, key = torch.randn(2, 1, 1, 512, 64)
    weights = made.map_queries(query) @ made.map_keys(key).mT
    assert 0.25 < weights.mean() < 5.0  # heavy tails at degree 6


def test_gradients_are_those_of_the_formula():
    made = sketch(3, rank=2)
    for one_map in (made.map_queries, made.map_keys):
        assert torch.autograd.gradcheck(one_map, vectors().requires_grad_())


@pytest.mark.parametrize("name", ["degree", "num_features", "rank"])
def test_sizes_below_one_and_of_other_types_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        LowRankSketch(HEAD_DIM, **{name: 0})
    with pytest.raises(TypeError, match=f"{name} must be an integer, got 2.0"):
        LowRankSketch(HEAD_DIM, **{name: 2.0})
    with pytest.raises(TypeError, match="nonnegative must be True or False, got 1"):
        LowRankSketch(HEAD_DIM, nonnegative=1)
