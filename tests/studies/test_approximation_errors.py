"""What the studies of approximation compare: which maps, on which vectors, and that nothing held out is fitted to."""

import math

import pytest
import torch
import torch.nn.functional as F

from polysketch import attention, evaluation
from polysketch.models import ModelConfig, TransformerLM
from polysketch.studies.approximation.contenders import APPROXIMATIONS, CONTENDERS, rank_of
from polysketch.studies.approximation.maps import MapSettings, measure_map
from polysketch.studies.approximation.mechanisms import MechanismSettings, measure_mechanism
from polysketch.studies.approximation.vectors import gaussian_vectors, model_vectors

HEAD_DIM = 6
SMALL = {"features": (6,), "lengths": (30,), "fit_tokens": 60, "steps": 30, "batch_size": 40}


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_the_random_sketch_is_unbiased_for_the_kernel(degree: int):
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 3, HEAD_DIM) / 2
    draws = [CONTENDERS["random"].build(HEAD_DIM, degree, 20) for _ in range(300)]
    found = torch.stack([evaluation.feature_weights(one, query, key) for one in draws]).detach()
    exact = evaluation.polynomial_weights(query, key, degree)
    assert ((found.mean(0) - exact).abs() < 4.5 * found.std(0) / len(draws) ** 0.5).all()


@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.parametrize("features", [3, 10, 256])
def test_no_contender_has_more_rank_than_features_asked_for(name: str, features: int):
    """A power-two map keeps r (r + 1) / 2 sums; the next r would be too many."""
    made = CONTENDERS[name].build(HEAD_DIM, 4, features)
    assert rank_of(made) <= features
    assert rank_of(made) + made.feature_dim + 1 > features


def test_squared_maps_are_for_powers_of_two_from_four_on():
    assert [degree for degree in range(2, 10) if CONTENDERS["srht-squared"].takes(degree)] == [4, 8]
    assert all(CONTENDERS["llops"].takes(degree) for degree in range(2, 10))


@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_every_approximation_has_a_mechanism_and_the_exact_one_is_exact(name: str):
    one = APPROXIMATIONS[name]
    built = attention.build(name, num_heads=1, head_dim=8, **one.options(16)).double()
    exact = attention.build(one.exact[0], num_heads=1, head_dim=8, **one.exact[1]).double()
    query, key, value = torch.randn(3, 1, 1, 20, 8, dtype=torch.float64)
    assert not torch.allclose(built(query, key, value, causal=one.causal), exact(query, key, value, causal=one.causal))


def test_fitted_and_held_out_vectors_are_different_ones():
    found = gaussian_vectors(HEAD_DIM, 50, 40, seed=0)[0]
    assert found.fitted[0].shape == (50, HEAD_DIM)
    assert found.held_out[1].shape == (40, HEAD_DIM)
    everything = torch.cat([*found.fitted, *found.held_out])
    assert len(torch.unique(everything, dim=0)) == 180
    torch.testing.assert_close(everything, F.layer_norm(everything, (HEAD_DIM,)), rtol=1e-3, atol=1e-4)


@pytest.fixture
def model() -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(ModelConfig(20, 2, 24, 4, num_kv_heads=2, attention="softmax"))


@pytest.mark.parametrize("norm", [False, True])
def test_the_vectors_of_a_model_are_those_of_the_head_and_of_its_key_head(model: TransformerLM, norm: bool):
    fitted, held_out = torch.randint(20, (2, 3, 8), generator=torch.Generator().manual_seed(1))
    found = model_vectors(model, fitted, held_out[:2], layers=(1,), heads=(0, 3), norm=norm)
    layers = [evaluation.attention_inputs(model, ids)[1] for ids in (fitted, held_out[:2])]
    expected = layers[0].query[:, 3].flatten(0, 1), layers[1].key[:, 1].flatten(0, 1)
    if norm:
        expected = tuple(F.layer_norm(x, (HEAD_DIM,)) for x in expected)
    assert [one.name for one in found] == ["layer 1 head 0", "layer 1 head 3"]
    assert torch.equal(found[1].fitted[0], expected[0])
    assert torch.equal(found[1].held_out[1], expected[1])
    assert torch.equal(found[1].sequence[2], layers[1].value[:1, 1:2])


def test_a_fit_sees_nothing_that_is_held_out():
    """Other held-out vectors change no error on the fitted ones."""
    found = []
    for seed in (0, 1):
        vectors, other = gaussian_vectors(HEAD_DIM, 60, 30, 0)[0], gaussian_vectors(HEAD_DIM, 60, 30, seed)[0]
        held_out = vectors._replace(held_out=other.held_out)
        found.append([measure_map(name, held_out, 2, MapSettings(**SMALL), 0)[0] for name in ("llops", "network")])
    assert [one["fitted"] for one in found[0]] == [one["fitted"] for one in found[1]]
    assert [one["held_out"] for one in found[0]] != [one["held_out"] for one in found[1]]


def test_the_scale_of_queries_and_keys_changes_no_relative_error():
    vectors, settings = gaussian_vectors(HEAD_DIM, 60, 30, 0)[0], MapSettings(**SMALL)
    (first, second), (third, fourth) = vectors.fitted, vectors.held_out
    scaled = vectors._replace(fitted=(4 * first, 2 * second), held_out=(4 * third, 2 * fourth))
    plain, other = (measure_map("llops", one, 2, settings, 0)[0] for one in (vectors, scaled))
    assert plain["held_out"]["optimum"] == pytest.approx(other["held_out"]["optimum"])
    assert plain["held_out"]["ratio"] == pytest.approx(other["held_out"]["ratio"], rel=0.05)


def test_llops_is_fitted_from_a_start_scaled_to_the_kernel():
    query, key = gaussian_vectors(HEAD_DIM, 60, 30, 0)[0].fitted
    errors = []
    for start in (None, CONTENDERS["llops"].start):
        torch.manual_seed(0)
        made = CONTENDERS["llops"].build(HEAD_DIM, 3, 5)
        if start is not None:
            start(made, query, key, 3)
        weights = evaluation.feature_weights(made, query[None, None], key[None, None])[0, 0].detach()
        errors.append(float(evaluation.relative_frobenius_error(weights, evaluation.polynomial_weights(query, key, 3))))
    assert errors[1] < 1 < errors[0]


@pytest.mark.parametrize("degree", [2, 3])
def test_any_forms_reach_the_optimum_on_their_own_tokens_and_the_kernel_with_features_enough(degree: int):
    """At six features on 60 tokens; on others when there are as many features as monomials of three entries."""
    vectors = gaussian_vectors(HEAD_DIM, 60, 60, 0)
    found = measure_map("forms", vectors[0], degree, MapSettings(**{**SMALL, "lengths": (60,)}), 0)[0]
    assert found["fitted"]["ratio"] == pytest.approx(1, abs=1e-3)
    assert found["held_out"]["ratio"] > 1.02
    assert 0 < found["factor_error"][0] < 1
    few = vectors[0]._replace(fitted=_narrow(vectors[0].fitted), held_out=_narrow(vectors[0].held_out))
    enough = MapSettings(**{**SMALL, "features": (math.comb(degree + 2, 2),)})
    assert measure_map("forms", few, degree, enough, 0)[0]["held_out"]["frobenius"] < 1e-2


def _narrow(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Their first three entries."""
    return pair[0][:, :3], pair[1][:, :3]


def test_a_higher_rank_holds_what_a_lower_one_holds():
    """Factors of rank one beside zeros."""
    torch.manual_seed(0)
    one, two = (CONTENDERS[name].build(HEAD_DIM, 3, 5) for name in ("llops", "llops-rank-2"))
    with torch.no_grad():
        for narrow, wide in zip(one.parameters(), two.parameters(), strict=True):
            wide.zero_()[:, :1] = narrow
    query, key = torch.randn(2, 1, 1, 4, HEAD_DIM)
    torch.testing.assert_close(evaluation.feature_weights(two, query, key), evaluation.feature_weights(one, query, key))


def test_the_errors_of_mechanisms_are_those_of_their_weights():
    vectors = gaussian_vectors(HEAD_DIM, 60, 30, 0)
    settings = MechanismSettings(features=(6,), lengths=(30,), windows=(6, 90))
    found = measure_mechanism("sliding-window", vectors[0], settings, 0)[0]
    query, key, value = (x[0, 0].double() for x in vectors[0].sequence)
    scores = query @ key.T / HEAD_DIM**0.5 + torch.full((30, 30), -math.inf, dtype=torch.float64).triu(1)
    exact = scores.softmax(-1)
    near = scores.masked_fill(torch.ones(30, 30).tril(-6).bool(), -math.inf).softmax(-1)
    assert found["frobenius"] == pytest.approx(float((near - exact).norm() / exact.norm()))
    norms = [float(torch.linalg.svdvals(matrix)[0]) for matrix in ((near - exact) @ value, exact, value)]
    assert found["operator_norm_error"] == pytest.approx(norms[0] / norms[1] / norms[2])
    assert found["alpha"] == pytest.approx(30 * float(exact.square().sum(0).max()))
    assert found["beyond"] == {"6": 0.0}
    assert found["exact_beyond"]["6"] == pytest.approx(float(exact.tril(-6).sum(-1)[6:].mean()))
    assert found["alpha_without_sinks"] is None
