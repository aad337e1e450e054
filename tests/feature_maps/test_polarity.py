"""Polarity features: the two signs apart, to learned powers; what they say of a product of vectors."""

import pytest
import torch
from torch import Tensor

from polysketch.feature_maps import PolarityFeatures

HEADS, HEAD_DIM = 3, 6


def vectors(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, HEADS, 5, HEAD_DIM, generator=generator, dtype=torch.float64)


def build(*, plain: bool = False) -> PolarityFeatures:
    """A map with scales and powers of its own for every channel; if `plain`, of power 1 everywhere."""
    torch.manual_seed(0)
    feature_map = PolarityFeatures(HEAD_DIM, num_kv_heads=HEADS).double()
    feature_map.scale.weight.data.normal_()
    feature_map.exponent.data.normal_()
    if plain:
        feature_map.exponent.data.fill_(-torch.inf)
    return feature_map


def scaled(feature_map: PolarityFeatures, x: Tensor) -> Tensor:
    return x / torch.log1p(feature_map.scale.weight.exp())[:, None]


def test_features_are_their_formula():
    feature_map, x = build(), vectors()
    y, power = scaled(feature_map, x), 1 + 4 / (1 + (-feature_map.exponent).exp())[:, None]
    expected = torch.cat([torch.where(y > 0, y.abs() ** power, 0), torch.where(y < 0, y.abs() ** power, 0)], -1)
    torch.testing.assert_close(feature_map.map(x), expected)


def test_a_map_starts_with_cubes_of_entries_over_log_two():
    x = vectors()
    expected = (x.relu() / torch.log(torch.tensor(2.0, dtype=torch.float64))) ** 3
    torch.testing.assert_close(PolarityFeatures(HEAD_DIM).double().map(x)[..., :HEAD_DIM], expected)


def test_features_are_non_negative_and_one_of_two_signs_is_zero():
    features = build().map(vectors())
    assert features.min() >= 0
    assert (features[..., :HEAD_DIM] * features[..., HEAD_DIM:]).eq(0).all()
    assert (features[..., :HEAD_DIM] + features[..., HEAD_DIM:]).gt(0).all()


def test_opposed_features_are_those_of_the_opposite_vector():
    feature_map, x = build(), vectors()
    assert torch.equal(feature_map.opposed(feature_map.map(x)), feature_map.map(-x))


def test_at_power_one_the_same_signs_less_the_opposite_ones_are_the_product():
    feature_map, query, key = build(plain=True), vectors(), vectors(seed=2)
    query_features, key_features = feature_map.map_both(query, key)
    same = query_features @ key_features.mT
    opposite = feature_map.opposed(query_features) @ key_features.mT
    torch.testing.assert_close(same - opposite, scaled(feature_map, query) @ scaled(feature_map, key).mT)
    absolute = scaled(feature_map, query).abs() @ scaled(feature_map, key).abs().mT
    torch.testing.assert_close(same + opposite, absolute)


def test_entries_of_zero_have_features_of_zero_and_finite_gradients():
    feature_map, x = build(), vectors()
    x[:, :, 2] = 0
    features = feature_map.map(x.requires_grad_())
    assert features[:, :, 2].eq(0).all()
    features.square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (x, *feature_map.parameters()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_powers_of_half_precision_are_taken_in_float32(dtype: torch.dtype):
    feature_map, x = build().float(), (100 * vectors()).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        features = feature_map.map(x)
    assert features.dtype == torch.float32
    assert features.max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(features.double(), feature_map.double().map(x.double()), rtol=1e-5, atol=0)
