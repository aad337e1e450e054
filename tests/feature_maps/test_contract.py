"""What holds for every feature map; one is tested by being a public name. A case here is more options to test."""

import pytest
import torch

from polysketch import feature_maps
from polysketch.feature_maps import (
    Elementwise,
    FeatureMap,
    FocusedFeatures,
    GaussianSketch,
    Hedgehog,
    Identity,
    LearnedSketch,
    LowRankSketch,
    PerformerFeatures,
    PolarityFeatures,
    PowerSketches,
    RandomSketch,
    SRHTSketch,
    SymmetricPowers,
    SymmetricSquare,
    Taylor,
    TwoLayerNetwork,
)

HEAD_DIM, KV_HEADS = 6, 2
CASES = [
    (Identity, {}),
    (GaussianSketch, {"degree": 2}),
    (GaussianSketch, {"sketch_size": 5}),
    (GaussianSketch, {"sketch_size": 5, "degree": 8, "share": "head"}),
    (SRHTSketch, {"degree": 2}),
    (SRHTSketch, {"sketch_size": 5}),
    (SRHTSketch, {"sketch_size": 5, "degree": 8, "share": "head"}),
    (LowRankSketch, {"num_features": 5}),
    (LowRankSketch, {"num_features": 5, "degree": 3, "rank": 2, "share": "head"}),
    (LowRankSketch, {"num_features": 5, "degree": 2, "nonnegative": True}),
    (TwoLayerNetwork, {"num_features": 5}),
    (TwoLayerNetwork, {"num_features": 5, "hidden_size": 7}),
    (LearnedSketch, {"sketch_size": 5}),
    (LearnedSketch, {"sketch_size": 5, "degree": 8, "share": "head"}),
    (Hedgehog, {}),
    (Hedgehog, {"num_features": 16}),
    (SymmetricSquare, {}),
    (SymmetricPowers, {}),
    (SymmetricPowers, {"degree": 4}),
    (PowerSketches, {"degree": 1}),
    (PowerSketches, {"degree": 3, "sketch_size": 5, "share": "head"}),
    (Taylor, {"projected_dim": 3}),
    (Taylor, {"projected_dim": 4}),
    (Elementwise, {}),
    (Elementwise, {"kind": "squared-relu"}),
    (PerformerFeatures, {"num_features": 20}),
    (FocusedFeatures, {}),
    (FocusedFeatures, {"focus": 1.5}),
    (PolarityFeatures, {}),
    (PerformerFeatures, {"num_features": 7, "kind": "relu", "orthogonal": False}),
]
ABSTRACT = {FeatureMap, RandomSketch}
PUBLIC = [getattr(feature_maps, name) for name in feature_maps.__all__]
KINDS = [kind for kind in PUBLIC if isinstance(kind, type) and issubclass(kind, FeatureMap) and kind not in ABSTRACT]
CASES += [(kind, {}) for kind in KINDS if kind not in {named for named, _ in CASES}]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].__name__} {case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[type[FeatureMap], dict]:
    return request.param


def build(case: tuple[type[FeatureMap], dict], seed: int = 0) -> FeatureMap:
    """The map, its parameters moved a little: some start the same for every seed and head."""
    torch.manual_seed(seed)
    feature_map = case[0](HEAD_DIM, num_kv_heads=KV_HEADS, **case[1]).double()
    for parameter in feature_map.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return feature_map


def vectors(heads: int = 4, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, heads, 7, HEAD_DIM, generator=generator, dtype=torch.float64)


def test_features_have_the_width_the_map_names(case):
    feature_map = build(case)
    assert feature_map.map_queries(vectors(4)).shape == (3, 4, 7, feature_map.feature_dim)
    assert feature_map.map_keys(vectors(2)).shape == (3, 2, 7, feature_map.feature_dim)
    assert feature_map.power in (1, 2)


def test_a_vectors_features_depend_on_it_alone(case):
    feature_map, x = build(case), vectors()
    row = feature_map.map_queries(x[1:2, :, 3:4])
    torch.testing.assert_close(feature_map.map_queries(x)[1:2, :, 3:4], row)


def test_query_heads_use_the_map_of_their_key_head(case):
    feature_map, x = build(case), vectors(2)
    for one_map in (feature_map.map_queries, feature_map.map_keys):
        repeated = one_map(x.repeat_interleave(2, dim=1))
        torch.testing.assert_close(repeated, one_map(x).repeat_interleave(2, dim=1))


def test_both_at_once_are_each_alone(case):
    feature_map, query, key = build(case), vectors(4), vectors(2, seed=2)
    query_features, key_features = feature_map.map_both(query, key)
    torch.testing.assert_close(query_features, feature_map.map_queries(query))
    torch.testing.assert_close(key_features, feature_map.map_keys(key))


def test_heads_differ_only_where_each_has_a_map_of_its_own(case):
    feature_map, x = build(case), vectors(1).expand(-1, 2, -1, -1)
    features = feature_map.map_keys(x)
    assert torch.allclose(features[:, 0], features[:, 1]) == (feature_map.share != "head")


def test_strides_do_not_matter(case):
    feature_map, x = build(case), vectors()
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    torch.testing.assert_close(feature_map.map_queries(strided), feature_map.map_queries(x))


def test_a_reloaded_map_computes_the_same(case):
    feature_map, other, x = build(case), build(case, seed=5), vectors()
    if feature_map.state_dict():
        assert not torch.allclose(other.map_queries(x), feature_map.map_queries(x))
    other.load_state_dict(feature_map.state_dict())
    assert torch.equal(other.map_queries(x), feature_map.map_queries(x))


def test_gradients_reach_the_input_and_every_parameter(case):
    feature_map, x = build(case), vectors().requires_grad_()
    sum(features.square().sum() for features in feature_map.map_both(x, x)).backward()
    assert all(bool(tensor.grad.abs().sum() > 0) for tensor in (x, *feature_map.parameters()))


def test_resample_with_a_generator_is_deterministic_and_moves_random_maps_only(case):
    feature_map, x = build(case), vectors()
    before = feature_map.map_queries(x)
    feature_map.resample(torch.Generator().manual_seed(7))
    first = feature_map.map_queries(x)
    feature_map.resample()
    feature_map.resample(torch.Generator().manual_seed(7))
    assert torch.equal(feature_map.map_queries(x), first)
    random = set(dict(feature_map.named_buffers())) & set(feature_map.state_dict())  # others are constants
    assert torch.equal(first, before) == (not random)


def test_the_representation_names_width_and_power(case):
    feature_map = build(case)
    assert f"head_dim={HEAD_DIM}, feature_dim={feature_map.feature_dim}, power={feature_map.power}" in repr(feature_map)


@pytest.mark.parametrize("shape", [(3, 4, 7, HEAD_DIM + 1), (4, 7, HEAD_DIM)])
def test_other_shapes_are_refused(case, shape):
    with pytest.raises(ValueError, match=f"length, {HEAD_DIM}\\), got"):
        build(case).map_queries(torch.randn(shape))


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_are_no_positive_integers_are_refused(kind):
    with pytest.raises(ValueError, match="head_dim must be at least 1, got 0"):
        kind(0)
    with pytest.raises(TypeError, match="num_kv_heads must be an integer"):
        kind(4, num_kv_heads=2.0)


def test_heads_that_the_maps_do_not_divide_are_refused():
    feature_map = GaussianSketch(HEAD_DIM, num_kv_heads=2, share="head")
    with pytest.raises(ValueError, match="a multiple of 2 heads"):
        feature_map.map_queries(torch.randn(1, 3, 2, HEAD_DIM))


@pytest.mark.parametrize(("degree", "smallest"), [(6, 2), (0, 2), (3, 2), (2, 4), (12, 4)])
def test_degrees_that_do_not_halve_are_refused(degree, smallest):
    kind = {2: GaussianSketch, 4: LearnedSketch}[smallest]
    with pytest.raises(ValueError, match=f"degree must be at least 1|power of two, {smallest} or more, got {degree}"):
        kind(HEAD_DIM, degree=degree)
