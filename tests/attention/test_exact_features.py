"""BASED, Hedgehog and the exact symmetric power against their quadratic formulas."""

import pytest
import torch
from torch import Tensor

from attention.cases import HEAD_DIM, HEADS, Case
from polysketch import attention


def attend(weights: Tensor, value: Tensor, offset: float = 0.0, *, causal: bool = True) -> Tensor:
    """By all weights; key heads are repeated for the query heads they serve."""
    weights = weights.tril() if causal else weights
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
    return weights @ value / (offset + weights.sum(-1, keepdim=True))


def for_queries(weight: Tensor) -> Tensor:
    """(kv_heads, ., .) repeated for the query heads they serve."""
    return weight.repeat_interleave(HEADS // weight.shape[0], dim=0)


def inner(query: Tensor, key: Tensor) -> Tensor:
    """All inner products of queries with the keys of their head."""
    return query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("feature_dim", "kv_heads"), [(16, HEADS), (5, 2)])
def test_based_attention_is_its_formula(feature_dim: int, kv_heads: int, causal: bool):
    case = Case("based", {"feature_dim": feature_dim}, kv_heads=kv_heads)
    mechanism, (query, key, value, _) = case.build(), case.inputs()
    maps = mechanism.feature_map
    s = inner(query @ for_queries(maps.query_projection.weight), key @ maps.key_projection.weight) / feature_dim**0.5
    assert s.std() > 0.1
    expected = attend(1 + s + s**2 / 2, value, 1e-12, causal=causal)
    torch.testing.assert_close(mechanism(query, key, value, causal=causal), expected)


def test_based_attention_has_153_features_unless_told_otherwise():
    assert attention.build("based", num_heads=2, head_dim=64).feature_map.feature_dim == 153


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_features", "kv_heads"), [(None, HEADS), (30, 2)])
def test_hedgehog_attention_is_its_formula(num_features: int | None, kv_heads: int, causal: bool):
    case = Case("hedgehog", {"num_features": num_features}, kv_heads=kv_heads)
    mechanism, (query, key, value, _) = case.build(), case.inputs()
    maps = mechanism.feature_map
    x, y = query @ for_queries(maps.query_projection.weight), key @ maps.key_projection.weight
    weights = inner(x.softmax(-1), y.softmax(-1)) + inner((-x).softmax(-1), (-y).softmax(-1))
    torch.testing.assert_close(mechanism(query, key, value, causal=causal), attend(weights, value, causal=causal))


@pytest.mark.parametrize("name", ["based", "hedgehog"])
def test_without_an_offset_values_that_are_all_one_stay_one(name: str):
    mechanism, (query, key, value, _) = Case(name).build(), Case(name).inputs()
    torch.testing.assert_close(mechanism(query, key, torch.ones_like(value)), torch.ones_like(value))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("degree", "kv_heads"), [(2, HEADS), (4, HEADS), (4, 1)])
def test_the_symmetric_power_is_polynomial_attention_of_its_degree(degree: int, kv_heads: int, causal: bool):
    # Weights small enough that the 1 in the denominator counts.
    case = Case("symmetric-power", {"degree": degree}, kv_heads=kv_heads, norm_scale=0.1)
    mechanism, (query, key, value, _) = case.build(), case.inputs()
    polynomial = attention.build(
        "polynomial", num_heads=HEADS, head_dim=HEAD_DIM, num_kv_heads=kv_heads, degree=degree
    ).double()
    polynomial.load_state_dict(mechanism.state_dict())
    found, expected = mechanism(query, key, value, causal=causal), polynomial(query, key, value, causal=causal)
    torch.testing.assert_close(found, expected)
    assert polynomial(query, key, torch.ones_like(value), causal=causal).mean() < 0.95


@pytest.mark.parametrize("degree", [2, 4])
def test_the_symmetric_power_is_its_formula(degree: int):
    case = Case("symmetric-power", {"degree": degree}, norm_scale=0.1)
    mechanism, (query, key, value, _) = case.build(), case.inputs()
    weights = inner(mechanism.query_norm(query), mechanism.key_norm(key)) ** degree
    torch.testing.assert_close(mechanism(query, key, value), attend(weights, value, 1.0))


@pytest.mark.parametrize("name", ["based", "hedgehog", "symmetric-power"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_near_full_precision(name: str, dtype: torch.dtype):
    options = {"degree": 4} if name == "symmetric-power" else {}
    case = Case(name, options)
    exact = case.build()
    rounded = case.build().to(dtype)
    exact.load_state_dict({key: tensor.double() for key, tensor in rounded.state_dict().items()})
    inputs = [x.to(dtype) for x in case.inputs()[:3]]
    expected, found = exact(*(x.double() for x in inputs)), rounded(*inputs)
    assert (found.double() - expected).norm() < 6 * torch.finfo(dtype).eps * expected.norm()


def test_a_row_whose_hedgehog_weights_all_underflow_is_zero_and_so_is_its_gradient():
    mechanism = attention.build("hedgehog", num_heads=1, head_dim=4)
    query = torch.tensor([500.0, 0.0, 0.0, -500.0]).expand(1, 1, 3, 4).clone().requires_grad_()
    output = mechanism(query, query.detach().roll(1, -1), torch.ones(1, 1, 3, 4))
    output.sum().backward()
    assert torch.equal(output, torch.zeros_like(output))
    assert query.grad is not None
    assert query.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("based", {"feature_dim": 0}, "feature_dim must be at least 1, got 0"),
        ("hedgehog", {"num_features": 17}, "num_features must be even and at least 2 \\* head_dim = 16, got 17"),
        ("symmetric-power", {"degree": 3}, "degree must be one of 2, 4, got 3"),
        ("symmetric-power", {"degree": 8}, "degree must be one of 2, 4, got 8"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        attention.build(name, num_heads=2, head_dim=8, **options)


@pytest.mark.parametrize(
    ("name", "option"), [("based", "feature_dim"), ("hedgehog", "num_features"), ("symmetric-power", "degree")]
)
def test_options_that_are_no_integers_are_refused(name: str, option: str):
    with pytest.raises(TypeError, match=f"{option} must be an integer, got 2.0"):
        attention.build(name, num_heads=2, head_dim=8, **{option: 2.0})


def test_wide_heads_have_an_exact_second_power_but_no_fourth():
    assert attention.build("symmetric-power", num_heads=1, head_dim=128).feature_map.feature_dim == 128
    with pytest.raises(ValueError, match="head_dim 128 makes 8256 packed features, expected at most 2100"):
        attention.build("symmetric-power", num_heads=1, head_dim=128, degree=4)
