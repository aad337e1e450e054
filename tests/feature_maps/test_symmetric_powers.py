"""Packed powers: every power of q . k from its slice, each product once."""

import math

import pytest
import torch

from polysketch.feature_maps import SymmetricPowers


@pytest.mark.parametrize(("head_dim", "degree"), [(1, 3), (3, 5), (6, 3), (8, 2), (63, 2), (200, 1)])
def test_the_products_of_each_slice_are_a_power_of_the_inner_product(head_dim: int, degree: int):
    feature_map = SymmetricPowers(head_dim, degree=degree)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 1, 5, head_dim, generator=generator, dtype=torch.float64) for _ in range(2))
    features = feature_map.map_both(x, y)
    assert feature_map.feature_dim == features[0].shape[-1] == math.comb(head_dim + degree, degree)
    for power, part in enumerate(feature_map.slices):
        found = features[0][..., part] @ features[1][..., part].mT
        torch.testing.assert_close(found, (x @ y.mT) ** power, rtol=1e-10, atol=1e-10)


def test_a_cast_of_the_module_leaves_the_factors_exact():
    feature_map = SymmetricPowers(4, degree=6).bfloat16().double()
    x = torch.rand(1, 1, 3, 4, dtype=torch.float64)
    weights = feature_map.map_queries(x) @ feature_map.map_keys(x).mT
    torch.testing.assert_close(weights, sum((x @ x.mT) ** power for power in range(7)), rtol=1e-12, atol=1e-12)


def test_too_many_features_are_refused():
    with pytest.raises(ValueError, match="head_dim 64 makes 2145 packed products of up to 2 entries, expected at most"):
        SymmetricPowers(64, degree=2)
    with pytest.raises(ValueError, match="degree must be at least 1, got 0"):
        SymmetricPowers(4, degree=0)
