"""Performer attention: what it estimates, how fast it gets there, and that nothing leaks or overflows."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polysketch import attention

HEAD_DIM, LENGTH = 16, 24


def inputs(scale: float = 0.4, dtype: torch.dtype = torch.float32, head_dim: int = HEAD_DIM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, LENGTH, head_dim, generator=generator) for _ in range(3))
    return [(scale * query).to(dtype), (scale * key).to(dtype), value.to(dtype)]


def build(head_dim: int = HEAD_DIM, **options) -> attention.Mechanism:
    return attention.build("performer", num_heads=2, head_dim=head_dim, **{"seed": 0, **options})


def error(seed: int, num_features: int) -> Tensor:
    """Of softmax attention, relative."""
    query, key, value = inputs()
    exact = scaled_dot_product_attention(query, key, value, is_causal=True)
    return (build(num_features=num_features, seed=seed)(query, key, value) - exact).norm() / exact.norm()


def test_it_approaches_softmax_attention_as_one_over_the_root_of_its_features():
    few, many = (torch.stack([error(seed, size) for seed in range(8)]).mean() for size in (128, 2048))
    assert many < 0.05
    assert 3 < few / many < 5


@pytest.mark.parametrize("kind", ["softmax", "relu"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [HEAD_DIM, 128, 256])
def test_performer_attention_is_its_formula_without_constants(kind: str, causal: bool, head_dim: int):
    mechanism, (query, key, value) = build(head_dim, kind=kind), inputs(1.0, head_dim=head_dim)
    weight = mechanism.feature_map.weight.double()

    def exponents(x: Tensor) -> Tensor:
        x = x.double() * head_dim**-0.25
        return x @ weight.T - x.square().sum(-1, keepdim=True) / 2

    features = {
        "softmax": lambda: ((exponents(query) - exponents(query).amax(-1, True)).exp(), exponents(key).exp(), 1e-6),
        "relu": lambda: (*((x.double() @ weight.T * head_dim**-0.25).relu() for x in (query, key)), 1e-3),
    }
    query_features, key_features, epsilon = features[kind]()
    weights = (query_features + epsilon) @ (key_features + epsilon).mT
    weights = weights.tril() if causal else weights
    expected = weights @ value.double() / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(mechanism(query, key, value, causal=causal), expected.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_a_loud_key_to_come_changes_nothing_before_it(scale: float):
    mechanism, (query, key, value) = build().double(), inputs(scale, torch.float64)
    louder = torch.cat([key[:, :, :10], 5 * key[:, :, 10:]], 2)
    before, after = mechanism(query, key, value), mechanism(query, louder, value)
    torch.testing.assert_close(after[:, :, :10], before[:, :, :10], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(after[:, :, 10:], before[:, :, 10:])


@pytest.mark.parametrize("kind", ["softmax", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_outputs_stay_within_the_values_in_every_dtype_at_any_norm(kind: str, dtype: torch.dtype, scale: float):
    mechanism, (query, key, value) = build(128, kind=kind), inputs(scale, dtype, head_dim=128)
    output = mechanism(query, key, value)
    state = mechanism.init_state(2)
    decoded, _ = mechanism.extend(query, key, value, state)
    for found in (output, decoded):
        assert found.dtype == dtype
        assert found.isfinite().all()
        assert found.abs().max() <= 1.01 * value.abs().max()


def test_half_precision_loses_no_more_than_its_inputs_do():
    mechanism, given = build(), inputs(1.0, torch.float16)
    exact = mechanism(*(x.float() for x in given))
    torch.testing.assert_close(mechanism(*given).float(), exact, rtol=1e-3, atol=1e-4)


def test_all_heads_share_one_matrix_and_layers_have_their_own():
    torch.manual_seed(0)
    one, other = (build(seed=None) for _ in range(2))
    assert one.feature_map.weight.shape == (256, HEAD_DIM)
    assert not torch.equal(one.feature_map.weight, other.feature_map.weight)


def test_it_redraws_before_the_multiples_of_its_interval_the_next_of_its_seed():
    mechanism, other = build(redraw_interval=3, seed=5), build(seed=5)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    draws = [other.feature_map.weight.clone()]
    for _ in range(2):
        other.feature_map.resample()
        draws.append(other.feature_map.weight.clone())
    for step in range(9):
        mechanism.redraw(step)
        assert torch.equal(mechanism.feature_map.weight, draws[step // 3])
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(draws[1], draws[2])


def test_without_an_interval_nothing_is_redrawn():
    mechanism = build()
    weight = mechanism.feature_map.weight.clone()
    for step in range(5):
        mechanism.redraw(step)
    assert torch.equal(mechanism.feature_map.weight, weight)


def test_a_reloaded_mechanism_redraws_alike():
    mechanism, other = build(redraw_interval=1, seed=1), build(redraw_interval=1, seed=2)
    mechanism.redraw(1)
    other.load_state_dict(mechanism.state_dict())
    for one in (mechanism, other):
        one.redraw(2)
    assert torch.equal(other.feature_map.weight, mechanism.feature_map.weight)


@pytest.mark.parametrize(("interval", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_an_interval_is_a_positive_integer(interval, error):
    with pytest.raises(error, match="redraw_interval must be"):
        build(redraw_interval=interval)


def test_options_are_refused_by_name():
    with pytest.raises(ValueError, match="unknown kind 'elu'"):
        build(kind="elu")
    with pytest.raises(ValueError, match=r"no option 'degree' .*; it takes num_features, kind, seed, redraw_interval"):
        build(degree=8)
