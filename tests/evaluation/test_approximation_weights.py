"""The matrix of weights of any mechanism, and what the mechanisms of a model are given."""

import pytest
import torch
from torch import Tensor

from attention.cases import CASES, Case
from polysketch import attention, evaluation
from polysketch.feature_maps import GaussianSketch
from polysketch.models import ModelConfig, TransformerLM

NAMES = (
    "softmax",
    "polynomial",
    "polysketch-paper",
    "performer",
    "llops",
    "based",
    "sliding-window",
    "local",
    "nystrom",
)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=str)
def test_weights_times_values_are_the_output(case: Case):
    """At lengths that no width divides; of causal mechanisms nothing is above the diagonal."""
    mechanism = case.build()
    query, key, value, hidden = case.inputs()
    causal = mechanism.is_causal
    weights = evaluation.mechanism_weights(mechanism, query, key, causal=causal, hidden=hidden)
    value = value[..., :5]
    expected = mechanism(query, key, value, causal=causal, hidden=hidden)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    torch.testing.assert_close(weights @ value, expected)
    assert not causal or weights.triu(1).abs().max() == 0


def test_the_weights_of_softmax_attention_are_its_probabilities():
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 4, 21, 8, dtype=torch.float64)
    found = evaluation.mechanism_weights(attention.build("softmax", num_heads=4, head_dim=8), query, key)
    scores = query @ key.mT / 8**0.5 + torch.full((21, 21), -torch.inf).triu(1)
    torch.testing.assert_close(found, scores.softmax(-1))


def test_masked_keys_have_no_weight():
    mechanism, mask = attention.build("polynomial", num_heads=1, head_dim=8).double(), torch.ones(1, 10, dtype=bool)
    mask[:, :3] = False
    query, key = torch.randn(2, 1, 1, 10, 8, dtype=torch.float64)
    assert evaluation.mechanism_weights(mechanism, query, key, key_mask=mask)[..., :3].abs().max() == 0


def test_the_mass_beyond_the_window_of_a_sliding_window_is_zero_and_of_softmax_it_is_not():
    query, key = torch.randn(2, 1, 2, 33, 8, dtype=torch.float64)
    sliding = attention.build("sliding-window", num_heads=2, head_dim=8, window=6)
    softmax = attention.build("softmax", num_heads=2, head_dim=8)
    shares = [
        evaluation.mass_beyond_window(evaluation.mechanism_weights(one, query, key), 6) for one in (sliding, softmax)
    ]
    assert shares[0].max() == 0
    assert shares[1].min() > 0.3


def test_the_weights_of_features_are_their_products_to_the_power():
    torch.manual_seed(0)
    sketch = GaussianSketch(8, sketch_size=5, num_kv_heads=2, share="head").double()
    query, key = torch.randn(1, 4, 6, 8, dtype=torch.float64), torch.randn(1, 2, 7, 8, dtype=torch.float64)
    found = evaluation.feature_weights(sketch, query, key)
    for head in range(4):
        expected = (sketch.map_queries(query)[:, head] @ sketch.map_keys(key)[:, head // 2].mT) ** 2
        torch.testing.assert_close(found[:, head], expected)


@pytest.fixture
def model() -> TransformerLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "num_layers": 3, "hidden_size": 16, "num_heads": 2}
    return TransformerLM(ModelConfig(**sizes, attention="softmax"))


def test_the_inputs_of_attention_are_those_of_every_layer_in_order(model: TransformerLM):
    """Their attention, projected, leads to the hidden states of the model."""
    ids = torch.randint(20, (2, 9), generator=torch.Generator().manual_seed(1))
    found = evaluation.attention_inputs(model, ids)
    assert len(found) == 3
    hidden, _ = _embedded(model, ids)
    for block, (query, key, value, _) in zip(model.blocks, found, strict=True):
        attended = (query @ key.mT / 8**0.5 + torch.full((9, 9), -torch.inf).triu(1)).softmax(-1) @ value
        hidden = hidden + block.attention.output(attended.transpose(1, 2).flatten(2))
        hidden = hidden + block.feedforward(block.feedforward_norm(hidden))
    torch.testing.assert_close(model.final_norm(hidden), model.hidden_states(ids))


def test_weights_of_what_a_layer_is_given_are_those_of_the_layer():
    """Rotated vectors alone would give the far tokens of this mechanism other weights."""
    torch.manual_seed(0)
    options = {"window": 4, "sketch_size": 4, "far_bias": 0.0}
    sizes = {"vocab_size": 20, "num_layers": 1, "hidden_size": 16, "num_heads": 2}
    model = TransformerLM(ModelConfig(**sizes, attention="polysketch-window", attention_options=options))
    outputs = []
    model.blocks[0].attention.mechanism.register_forward_hook(lambda *call: outputs.append(call[-1]))
    [(query, key, value, given)] = evaluation.attention_inputs(model, torch.randint(20, (2, 30)))
    mechanism = model.blocks[0].attention.mechanism
    expected = outputs[0]
    torch.testing.assert_close(evaluation.mechanism_weights(mechanism, query, key, **given) @ value, expected)
    rotated = evaluation.mechanism_weights(mechanism, query, key, hidden=given["hidden"])
    assert not torch.allclose(rotated @ value, expected, rtol=0.05, atol=0.05)


def test_a_model_is_left_as_it_was_found(model: TransformerLM):
    model.train()
    ids = torch.zeros(1, 4, dtype=torch.int64)
    first = evaluation.attention_inputs(model, ids)[0]
    assert model.training
    assert not first.query.requires_grad
    (first.query * torch.ones(1, requires_grad=True)).sum().backward()  # no inference tensor: a map can be fitted
    model.hidden_states(ids)
    assert all(not block.attention.mechanism._forward_pre_hooks for block in model.blocks)


def _embedded(model: TransformerLM, ids: Tensor) -> tuple[Tensor, object]:
    caught = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, tensors: caught.append(tensors))
    model.hidden_states(ids)
    handle.remove()
    return caught[0]
