"""Focused features keep a token's length and turn it towards its largest entries, over all heads at once."""

import math

import pytest
import torch
from torch import Tensor

from polysketch.feature_maps import FocusedFeatures

HEADS, HEAD_DIM = 3, 6


def vectors(*, heads: int = HEADS, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, 5, HEAD_DIM, generator=generator, dtype=torch.float64)


def build(*, seed: int = 0, focus: float = 3.0, num_kv_heads: int = HEADS) -> FocusedFeatures:
    """A map whose channels have scales of their own."""
    torch.manual_seed(seed)
    feature_map = FocusedFeatures(HEAD_DIM, focus=focus, num_kv_heads=num_kv_heads).double()
    feature_map.scale.weight.data.normal_()
    return feature_map


def scaled(feature_map: FocusedFeatures, x: Tensor) -> Tensor:
    """y of the formula, with the heads of each token side by side: (batch, length, heads * head_dim)."""
    return ((x.relu() + 1e-6) / torch.log1p(feature_map.scale.weight.exp())[:, None]).transpose(1, 2).flatten(2)


def side_by_side(features: Tensor) -> Tensor:
    return features.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("focus", [1.5, 2, 3.0, 4])
def test_features_are_their_formula_over_the_whole_token(focus: float):
    feature_map, x = build(focus=focus), vectors()
    y = scaled(feature_map, x)
    expected = y**focus * (y.norm(dim=-1) / (y**focus).norm(dim=-1))[..., None]
    torch.testing.assert_close(side_by_side(feature_map.map_keys(x)), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("focus", [1.0, 3.0])
def test_focusing_keeps_the_length_of_a_token_and_the_order_of_its_entries(focus: float):
    feature_map, x = build(focus=focus), vectors()
    y, features = scaled(feature_map, x), side_by_side(feature_map.map_keys(x))
    torch.testing.assert_close(features.norm(dim=-1), y.norm(dim=-1))
    positive = y > 1e-4
    assert torch.equal((features * positive).argsort(-1), (y * positive).argsort(-1))
    assert torch.allclose(features, y) == (focus == 1)


@torch.no_grad()
def test_similar_tokens_become_more_alike_and_dissimilar_ones_less():
    one = torch.rand(1, 1, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    one[..., 0] += 2
    near, far = one.clone(), one.roll(1, -1)
    near[..., 1:] *= 1.5
    focused = FocusedFeatures(HEAD_DIM).map
    alike = [torch.cosine_similarity(focused(one), focused(x), dim=-1) for x in (near, far)]
    assert alike[0] > torch.cosine_similarity(one, near, dim=-1)
    assert alike[1] < torch.cosine_similarity(one, far, dim=-1)


def test_a_tokens_heads_share_one_length():
    feature_map, x = build(), vectors().abs()
    louder = x.clone()
    louder[:, 2] *= 10
    before, after = feature_map.map_keys(x), feature_map.map_keys(louder)
    # The large entries of head 2 take the length: the cubes of heads 0 and 1 count for less, all by one factor.
    ratio = after[:, :2] / before[:, :2]
    torch.testing.assert_close(ratio, ratio[:, :1, :, :1].expand_as(ratio))
    assert ratio.lt(0.5).all()


def test_grouped_queries_take_their_lengths_from_one_query_head_of_every_key_head():
    feature_map, query = build(num_kv_heads=2), vectors(heads=6)
    features = feature_map.map_queries(query)
    for member in range(3):
        torch.testing.assert_close(features[:, member::3], feature_map.map_queries(query[:, member::3]))


def test_a_token_without_a_positive_entry_has_small_equal_features_not_zeros():
    features = FocusedFeatures(HEAD_DIM, num_kv_heads=HEADS).map(-vectors().abs())
    torch.testing.assert_close(features, torch.full_like(features, 1e-6 / math.log(2)))


@pytest.mark.parametrize("size", [1e-18, 1e-6, 1e6, 1e18])
def test_features_of_float32_do_not_leave_its_range(size: float):
    feature_map, x = FocusedFeatures(HEAD_DIM, num_kv_heads=HEADS), vectors()
    features = feature_map.map((size * x).float())
    torch.testing.assert_close(features.double(), feature_map.double().map(size * x), rtol=1e-5, atol=1e-6 * size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cubes_of_half_precision_are_taken_in_float32(dtype: torch.dtype):
    feature_map, x = FocusedFeatures(HEAD_DIM, num_kv_heads=HEADS), (1000 * vectors()).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        features = feature_map.map(x)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features.double(), feature_map.double().map(x.double()), rtol=1e-5, atol=0)


def test_gradients_are_those_of_differences():
    feature_map, x = build(), vectors().requires_grad_()

    def features(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(feature_map, {"scale.weight": weight}, (x,))

    feature_map.forward = feature_map.map
    assert torch.autograd.gradcheck(features, (x, feature_map.scale.weight))


def test_a_focus_that_would_blur_or_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"focus must be at least 1 and finite, got 0\.5"):
        FocusedFeatures(HEAD_DIM, focus=0.5)
    with pytest.raises(ValueError, match="got nan"):
        FocusedFeatures(HEAD_DIM, focus=float("nan"))
    with pytest.raises(TypeError, match="focus must be a number, got '3'"):
        FocusedFeatures(HEAD_DIM, focus="3")
