"""The mechanism over `ops.hyper_attention`: options that come from a file, and what decoding has to do with them."""

import json

import torch

from attention.cases import HEAD_DIM, HEADS, Case
from polysketch import attention, ops
from polysketch.models import ModelConfig

OPTIONS = {"min_length": 8, "chunk_size": 4, "sample_size": 5, "capping": (0.5, 1.5)}


def test_options_that_have_been_through_json_give_the_same_mechanism():
    config = ModelConfig(16, 1, HEADS * HEAD_DIM, HEADS, attention="hyper", attention_options=OPTIONS)
    read = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))).attention_options
    one, other = (attention.build("hyper", num_heads=HEADS, head_dim=HEAD_DIM, **x) for x in (OPTIONS, read))
    other.load_state_dict(one.state_dict())
    query, key, value, _ = Case("hyper").inputs(dtype=torch.float32)
    assert torch.equal(one(query, key, value), other(query, key, value))
    assert repr(one) == repr(other)
    assert "capping=(0.5, 1.5)" in repr(one)


def test_the_options_reach_the_op():
    case = Case("hyper", OPTIONS)
    mechanism, (query, key, value, _) = case.build(), case.inputs()
    expected = ops.hyper_attention(
        query, key, value, hyperplanes=mechanism.hyperplanes, causal=True, **OPTIONS, sampling="uniform", seed=0
    )
    assert torch.equal(mechanism(query, key, value), expected)
    assert not torch.allclose(Case("hyper", OPTIONS | {"capping": None}).build()(query, key, value), expected)


def test_decoding_is_exact_whatever_the_options():
    case = Case("hyper", OPTIONS)
    mechanism, (query, key, value, _) = case.build(), case.inputs()
    output, _ = mechanism.extend(query, key, value, mechanism.init_state(len(query)))
    torch.testing.assert_close(output, ops.softmax_attention(query, key, value, causal=True))
