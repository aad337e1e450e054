"""In a module of half precision, what scales all weights of a head is computed in float32."""

from copy import deepcopy

import pytest
import torch

from attention.cases import HIDDEN
from polysketch import attention
from polysketch.attention.decay_gate import DecayGate
from polysketch.attention.prefix_gain import PrefixGain
from polysketch.feature_maps import SRHTSketch

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_decay_is_as_accurate_as_float32_gives_it(dtype: torch.dtype):
    torch.manual_seed(0)
    gate, hidden = DecayGate(HIDDEN, 8).to(dtype), torch.randn(2, 50, HIDDEN).to(dtype)
    found, exact = gate(hidden), deepcopy(gate).double()(hidden.double())
    assert found.dtype == torch.float32
    assert ((found - exact) / exact).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gain_multiplies_weights_by_itself(dtype: torch.dtype):
    torch.manual_seed(0)
    gain, features = PrefixGain(8).to(dtype), torch.randn(2, 8, 500, 16).to(dtype)
    gain.log_gain.data.uniform_(-9.0, 9.0)
    scaled = gain(features, features)
    assert [x.dtype for x in scaled] == [dtype, dtype]
    # The rounding of single features averages out; a rounded factor does not.
    query, key, before = (x.double().square().sum((0, 2, 3)) for x in (*scaled, features))
    assert (query / before * key / before / gain.log_gain.double().exp() - 1).abs().max() < 4e-4


@torch.no_grad()
def test_a_gain_as_large_as_degree_8_asks_for_leaves_the_features_of_float16_finite():
    gain = PrefixGain(1).half()
    gain.log_gain.data.fill_(30.0)
    scaled = gain(*(torch.full((1, 1, 2, 3), 2.0, dtype=torch.float16) for _ in range(2)))
    assert all(bool(x.isfinite().all()) for x in scaled)
    alone = scaled[0] / 2 * 2.0 * scaled[1] / 2  # what queries would have if they took all of it
    assert alone.isinf().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("degree", [4, 8])
def test_a_sketch_of_hadamard_transforms_keeps_the_scale_of_its_weights(dtype: torch.dtype, degree: int):
    torch.manual_seed(0)
    sketch, x = SRHTSketch(16, degree=degree, sketch_size=40).to(dtype), torch.randn(2, 4, 300, 16).to(dtype)
    weight, exact = (
        each.square().sum(-1).square() for each in (sketch.map(x).double(), sketch.double().map(x.double()))
    )
    assert abs((weight / exact).mean() - 1) < 5e-3


@pytest.mark.parametrize("causal", [True, False])
def test_features_that_cancel_in_a_weight_are_not_rounded_to_half_precision(causal):
    """Long queries and keys, most of them nearly orthogonal: s^2 is what is left of products 50 times as large."""
    torch.manual_seed(0)
    mechanism = attention.build("based", num_heads=2, head_dim=64).to(torch.bfloat16)
    query, key = (10 * torch.randn(2, 2, 40, 64).to(torch.bfloat16) for _ in range(2))
    value = torch.randn(2, 2, 40, 8).to(torch.bfloat16)
    found = mechanism(query, key, value, causal=causal).double()
    expected = deepcopy(mechanism).double()(query.double(), key.double(), value.double(), causal=causal)
    assert found.dtype == torch.float64
    assert (found - expected).norm() < 0.02 * expected.norm()  # features in bfloat16: 0.11 causal
