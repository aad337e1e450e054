"""Elementwise features against their formulas, and where rounding would leave a row without mass."""

import pytest
import torch
from torch.nn import functional as F

from polysketch.feature_maps import Elementwise

FORMULAS = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "squared-relu": lambda x: F.relu(x) ** 2,
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_features_are_the_formula_entry_by_entry(kind: str):
    x = torch.randn(2, 3, 40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    feature_map = Elementwise(6, kind=kind)
    torch.testing.assert_close(feature_map.map_queries(x), FORMULAS[kind](x))
    assert torch.equal(feature_map.map_keys(x), feature_map.map_queries(x))


@pytest.mark.parametrize("kind", FORMULAS)
def test_gradients_are_those_of_the_formula_at_large_entries_too(kind: str):
    x = torch.tensor([-800.0, -3.0, -0.5, 0.25, 2.0, 800.0]).double().expand(1, 1, 1, 6).clone().requires_grad_()
    (found,) = torch.autograd.grad(Elementwise(6, kind=kind).map_keys(x).sum(), x)
    (expected,) = torch.autograd.grad(FORMULAS[kind](x).sum(), x)
    torch.testing.assert_close(found, expected)


def test_elu_plus_one_stays_positive_where_adding_one_would_round_to_zero():
    x = torch.full((1, 1, 1, 2), -50.0)
    assert (F.elu(x) + 1).eq(0).all()
    assert torch.equal(Elementwise(2).map_keys(x), x.exp())


def test_an_unknown_kind_is_refused_with_the_list_of_those_that_exist():
    with pytest.raises(ValueError, match="unknown kind 'gelu'; known kinds: elu, relu, squared-relu"):
        Elementwise(4, kind="gelu")
