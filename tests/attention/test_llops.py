"""Attention over the learned low-rank sketch against its formula, and what a denominator asks of its weights."""

import pytest
import torch
from torch import Tensor

from attention.cases import HEAD_DIM, HEADS, Case
from polysketch import attention


def built(kv_heads: int = HEADS, **options) -> tuple[attention.Mechanism, Case]:
    """The mechanism, with factors of keys moved away from those of queries, where they start."""
    case = Case("llops", {"num_features": 24, **options}, kv_heads)
    mechanism = case.build()
    factors = mechanism.feature_map.key_factors
    factors.data.add_(0.2 * torch.randn_like(factors))
    return mechanism, case


def weights_of(mechanism: attention.Mechanism, query: Tensor, key: Tensor, *, square: bool) -> Tensor:
    """phi_Q(q_i) . phi_K(k_j) from the definition: a sum over terms of products over factors."""
    query_factors, key_factors = mechanism.feature_map.query_factors, mechanism.feature_map.key_factors
    group = mechanism.num_heads // mechanism.num_kv_heads
    features = [
        torch.einsum("bhnd,htpdm->bhtpnm", x, factors.repeat_interleave(group, 0)).prod(3).sum(2)
        for x, factors in ((query, query_factors), (key.repeat_interleave(group, 1), key_factors))
    ]
    query_features, key_features = (x.square() for x in features) if square else features
    return query_features @ key_features.mT


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize(("degree", "rank"), [(2, 1), (3, 1), (4, 2), (6, 1)])
def test_the_papers_attention_is_a_sum_of_values_with_weights_of_either_sign(degree: int, rank: int, kv_heads: int):
    mechanism, case = built(kv_heads, degree=degree, rank=rank)
    query, key, value, _ = case.inputs()
    weights = weights_of(mechanism, query, key, square=False)
    assert 0.05 < (weights < 0).double().mean() < 0.95
    expected = weights.tril() @ value.repeat_interleave(HEADS // kv_heads, 1)
    torch.testing.assert_close(mechanism(query, key, value), expected)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("degree", [2, 3])
def test_squared_features_give_weights_that_are_never_negative_and_may_be_normalised(degree: int, normalize: bool):
    mechanism, case = built(2, degree=degree, nonnegative=True, normalize=normalize)
    query, key, value, _ = case.inputs()
    weights = weights_of(mechanism, query, key, square=True).tril()
    assert (weights >= 0).all()
    assert 0.02 < (weights.sum(-1) < 1).double().mean() < 0.98  # so that the 1 in the denominator counts
    expected = weights @ value.repeat_interleave(2, 1)
    expected = expected / (1 + weights.sum(-1, keepdim=True)) if normalize else expected
    torch.testing.assert_close(mechanism(query, key, value), expected)
    inside = mechanism(query, key, torch.ones_like(value)) < 1
    assert bool(inside.all()) == normalize


def test_the_faithful_form_is_the_default():
    mechanism = attention.build("llops", num_heads=2, head_dim=HEAD_DIM)
    assert mechanism.feature_map.query_factors.shape == (2, 1, 4, HEAD_DIM, 256)
    assert not mechanism.normalize
    assert not mechanism.feature_map.nonnegative


def test_each_key_head_has_factors_of_its_own():
    assert built(2)[0].feature_map.key_factors.shape[0] == 2


def test_decoding_with_separate_factors_equals_the_whole_sequence():
    mechanism, case = built(2, degree=3, rank=2)
    query, key, value, _ = case.inputs()
    state, outputs = mechanism.init_state(query.shape[0], dtype=query.dtype), []
    for span in (slice(0, 20), slice(20, 21), slice(21, None)):
        output, state = mechanism.extend(query[:, :, span], key[:, :, span], value[:, :, span], state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 2), mechanism(query, key, value))


def test_gradients_are_those_of_the_formula():
    mechanism, case = built(degree=2, num_features=3)
    inputs = [x[:1, :, :5].requires_grad_() for x in case.inputs()[:3]]
    assert torch.autograd.gradcheck(lambda *tensors: mechanism(*tensors), inputs, fast_mode=True)
