"""Linear attention against the quadratic formula, and rows without any mass."""

import pytest
import torch
from torch.nn import functional as F

from attention.cases import Case
from polysketch import attention

FORMULAS = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "squared-relu": lambda x: F.relu(x) ** 2,
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", FORMULAS)
def test_linear_attention_is_its_formula(kind: str, causal: bool):
    case = Case("linear", {"kind": kind}, lean=0.5)
    query, key, value, _ = case.inputs()
    weights = FORMULAS[kind](query) @ FORMULAS[kind](key).mT
    weights = weights.tril() if causal else weights
    expected = (weights @ value / weights.sum(-1, keepdim=True)).nan_to_num(0.0)
    torch.testing.assert_close(case.build()(query, key, value, causal=causal), expected)


@pytest.mark.parametrize("kind", ["relu", "squared-relu"])
def test_a_query_without_weight_on_any_key_gives_zeros_and_finite_gradients(kind: str):
    mechanism = attention.build("linear", num_heads=1, head_dim=4, kind=kind)
    query, key, value = (torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    query[..., 0] = 1.0
    query[:, :, 2] *= -query[:, :, 2].sign()
    query.requires_grad_()
    output = mechanism(query, key.abs(), value)
    assert output[:, :, 2].eq(0).all()
    assert output[:, :, [0, 1, 3, 4, 5]].ne(0).any(-1).all()
    output.square().sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_elu_gives_weight_to_every_key_however_negative():
    mechanism = attention.build("linear", num_heads=1, head_dim=4)
    query, key, value = (*torch.full((2, 1, 1, 5, 4), -20.0), torch.randn(1, 1, 5, 4))
    expected = value.cumsum(2) / torch.arange(1, 6)[:, None]
    torch.testing.assert_close(mechanism(query, key, value), expected)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown kind 'softmax'"):
        attention.build("linear", num_heads=1, head_dim=4, kind="softmax")
