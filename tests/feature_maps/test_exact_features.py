"""Maps whose products are a kernel exactly, packed products, and softmax features."""

import math

import pytest
import torch
from torch import Tensor

from polysketch.feature_maps import Hedgehog, SymmetricSquare, Taylor
from polysketch.feature_maps.packing import pack_square, packed_size

HEADS, LENGTH = 4, 9
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def pair(head_dim: int, *, heads: int = HEADS, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    """Queries and keys."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> Tensor:
        return torch.randn(2, count, LENGTH, head_dim, generator=generator, dtype=torch.float64)

    return draw(heads), draw(kv_heads)


def weights(query_features: Tensor, key_features: Tensor) -> Tensor:
    """All products, key heads repeated for the query heads they serve."""
    group = query_features.shape[1] // key_features.shape[1]
    return query_features @ key_features.repeat_interleave(group, dim=1).mT


def plain_taylor(y: Tensor) -> Tensor:
    """1, y, and the whole tensor square: 273 features at width 16."""
    square = (y[..., :, None] * y[..., None, :]).flatten(-2)
    return torch.cat([torch.ones_like(y[..., :1]), y / y.shape[-1] ** 0.25, square / math.sqrt(2 * y.shape[-1])], -1)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 16])
def test_packed_products_are_each_unordered_pair_once_with_sqrt2_off_the_diagonal(width: int):
    x = torch.randn(width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = [x[i] * x[j] * (1 if i == j else math.sqrt(2)) for i in range(width) for j in range(i, width)]
    assert packed_size(width) == len(expected)
    torch.testing.assert_close(pack_square(x).sort().values, torch.stack(expected).sort().values, **EXACT)


@pytest.mark.parametrize("width", [1, 2, 5, 16, 64])
def test_packed_products_have_the_squared_inner_product(width: int):
    x, y = torch.randn(2, 50, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close((pack_square(x) * pack_square(y)).sum(-1), (x * y).sum(-1) ** 2)


def test_packed_products_have_the_gradient_of_their_formula():
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    assert torch.autograd.gradcheck(pack_square, x)


@pytest.mark.parametrize("head_dim", [1, 3, 8, 16])
def test_the_squared_product_of_symmetric_squares_is_the_fourth_power(head_dim: int):
    query, key = pair(head_dim)
    feature_map = SymmetricSquare(head_dim)
    found = weights(feature_map.map_queries(query), feature_map.map_keys(key)) ** feature_map.power
    torch.testing.assert_close(found, weights(query, key) ** 4)


def test_symmetric_squares_of_heads_beyond_64_are_refused():
    assert SymmetricSquare(64).feature_dim == 2080
    with pytest.raises(ValueError, match="head_dim 65 makes 2145 packed features, expected at most 2100"):
        SymmetricSquare(65)


@pytest.mark.parametrize(("head_dim", "projected_dim"), [(8, 16), (64, 16), (6, 5), (4, 1)])
def test_taylor_features_have_the_exponentials_taylor_polynomial(head_dim: int, projected_dim: int):
    query, key = pair(head_dim)
    feature_map = Taylor(head_dim, projected_dim=projected_dim, num_kv_heads=2).double()
    found = weights(feature_map.map_queries(query), feature_map.map_keys(key))
    query_weight = feature_map.query_projection.weight.repeat_interleave(2, dim=0)
    s = weights(query @ query_weight, key @ feature_map.key_projection.weight) / projected_dim**0.5
    assert s.abs().max() > 1  # so that every term counts
    torch.testing.assert_close(found, 1 + s + s**2 / 2, **EXACT)
    assert found.min() >= 0.5


def test_153_packed_taylor_features_have_the_products_of_the_plain_273():
    query, key = pair(64, heads=2)
    feature_map = Taylor(64, num_kv_heads=2).double()
    packed = feature_map.map_queries(query), feature_map.map_keys(key)
    plain = (
        plain_taylor(query @ feature_map.query_projection.weight),
        plain_taylor(key @ feature_map.key_projection.weight),
    )
    assert packed[0].shape[-1] == feature_map.feature_dim == 153
    assert plain[0].shape[-1] == 273
    torch.testing.assert_close(weights(*packed), weights(*plain), **EXACT)


def test_taylor_projections_keep_unit_variance_and_are_each_their_own():
    torch.manual_seed(0)
    feature_map = Taylor(64, num_kv_heads=3)
    matrices = torch.cat([feature_map.query_projection.weight, feature_map.key_projection.weight])
    assert matrices.shape == (6, 64, 16)
    torch.testing.assert_close(matrices.std((1, 2)) * 8, torch.ones(6), rtol=0.1, atol=0)
    assert torch.pdist(matrices.flatten(1)).min() > 1


@pytest.mark.parametrize("num_features", [None, 16, 30])
def test_hedgehog_features_are_positive_and_each_half_sums_to_one(num_features: int | None):
    query, _ = pair(8)
    feature_map = Hedgehog(8, num_features=num_features, num_kv_heads=2).double()
    for features in feature_map.map_both(query, query):
        assert features.shape[-1] == (num_features or 16)
        assert features.min() > 0
        for half in features.chunk(2, -1):
            torch.testing.assert_close(half.sum(-1), torch.ones_like(half[..., 0]))


def test_hedgehog_starts_at_the_softmax_of_its_input_and_of_its_negative():
    query, key = pair(8)
    feature_map = Hedgehog(8, num_kv_heads=2).double()
    for x, features in zip((query, key), feature_map.map_both(query, key), strict=True):
        torch.testing.assert_close(features, torch.cat([x.softmax(-1), (-x).softmax(-1)], -1))


def test_hedgehog_has_a_matrix_for_queries_and_another_for_keys_of_every_head():
    query, key = pair(8, heads=2)
    feature_map = Hedgehog(8, num_kv_heads=2).double()
    before = feature_map.map_both(query, key)
    for parameter in feature_map.parameters():
        assert parameter.shape == (2, 8, 8)
    feature_map.query_projection.weight.data[1] *= 2
    after = feature_map.map_both(query, key)
    torch.testing.assert_close(after[0][:, 1, :, :8], (2 * query[:, 1]).softmax(-1))
    assert torch.equal(after[0][:, 0], before[0][:, 0])
    assert torch.equal(after[1], before[1])


def test_columns_of_a_wider_hedgehog_beyond_the_identity_all_differ():
    torch.manual_seed(0)
    weight = Hedgehog(8, num_features=64, num_kv_heads=2).query_projection.weight
    torch.testing.assert_close(weight[..., :8], torch.eye(8).expand(2, 8, 8))
    assert min(torch.pdist(head.T).min() for head in weight) > 0.1
    torch.testing.assert_close(weight[..., 8:].square().sum(1).mean(), torch.tensor(1.0), rtol=0.15, atol=0)


@pytest.mark.parametrize("num_features", [15, 17, 14, 8])
def test_hedgehog_widths_that_are_odd_or_too_small_are_refused(num_features: int):
    with pytest.raises(ValueError, match=f"even and at least 2 \\* head_dim = 16, got {num_features}"):
        Hedgehog(8, num_features=num_features)


def test_a_projected_width_below_one_is_refused():
    with pytest.raises(ValueError, match="projected_dim must be at least 1, got 0"):
        Taylor(8, projected_dim=0)
