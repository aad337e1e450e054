"""The parts of a block: their formulas, their sizes, and that they fit together."""

import pytest
import torch
import torch.nn.functional as F

from polysketch import attention
from polysketch.nn import GatedLinearUnit, SelfAttention, TransformerBlock, gated_width, rotation_at
from polysketch.nn.joined_linear import JoinedLinear

HIDDEN, HEADS, HEAD_DIM = 12, 4, 6


def mechanism(name: str = "softmax", **options) -> attention.Mechanism:
    return attention.build(name, num_heads=HEADS, head_dim=HEAD_DIM, num_kv_heads=2, **options)


def block_of(kind: str = "softmax", **options) -> TransformerBlock:
    return TransformerBlock(HIDDEN, SelfAttention(HIDDEN, mechanism(kind, **options)))


def test_the_gated_width_is_eight_thirds_in_eights():
    assert [gated_width(width) for width in (768, 1024, 1280, 128, 384)] == [2048, 2728, 3408, 336, 1024]


def test_the_gated_linear_unit_is_its_formula():
    torch.manual_seed(0)
    unit, x = GatedLinearUnit(HIDDEN, 10), torch.randn(2, 3, HIDDEN)
    gate, up = x @ unit.gate_up.weight[:10].T, x @ unit.gate_up.weight[10:].T
    expected = (F.gelu(gate, approximate="tanh") * up) @ unit.down.weight.T
    torch.testing.assert_close(unit(x), expected)


def test_no_projection_has_a_bias():
    block = block_of()
    assert {name for name, _ in block.named_parameters() if name.endswith("bias")} == {
        "attention_norm.bias",
        "feedforward_norm.bias",
    }


def test_self_attention_projects_rotates_attends_and_merges():
    torch.manual_seed(0)
    layer, x = SelfAttention(HIDDEN, mechanism()), torch.randn(2, 5, HIDDEN)
    rotation = rotation_at(torch.arange(5), HEAD_DIM)
    query, key, value, _ = layer.project(x, rotation)
    assert query.shape == (2, HEADS, 5, HEAD_DIM)
    assert key.shape == value.shape == (2, 2, 5, HEAD_DIM)
    assert not torch.allclose(layer.project(x)[0], query)
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    expected = attended.transpose(1, 2).reshape(2, 5, -1) @ layer.output.weight.T
    torch.testing.assert_close(layer(x, rotation), expected)


def test_joined_maps_are_one_linear_layer_that_says_where_each_begins():
    torch.manual_seed(0)
    joined, x = JoinedLinear(HIDDEN, (5, 2), bias=True), torch.randn(3, HIDDEN)
    weights, biases = joined.weight.split(joined.parts), joined.bias.split(joined.parts)
    expected = torch.cat([F.linear(x, *each) for each in zip(weights, biases, strict=True)], -1)
    torch.testing.assert_close(joined(x), expected)
    assert [len(weight) for weight in weights] == [5, 2]


def test_a_block_adds_attention_then_the_feedforward():
    torch.manual_seed(0)
    block, x = block_of(), torch.randn(2, 5, HIDDEN)
    middle = x + block.attention(block.attention_norm(x))
    torch.testing.assert_close(block(x), middle + block.feedforward(block.feedforward_norm(middle)))


@pytest.mark.parametrize("name", [name for name, kind in attention.MECHANISMS.items() if kind.is_causal])
def test_a_block_extends_as_it_goes_forward(name: str):
    torch.manual_seed(0)
    block, x = block_of(name).double(), torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    state = block.attention.init_state(2, dtype=torch.float64)
    outputs = []
    for span in (slice(0, 4), slice(4, 5), slice(5, 9)):
        positions = torch.arange(span.start, span.stop)
        output, state = block.extend(x[:, span], state, rotation_at(positions, HEAD_DIM))
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), block(x, rotation_at(torch.arange(9), HEAD_DIM)))


def test_a_block_without_rotary_positions_gives_none_to_its_mixer():
    torch.manual_seed(0)
    block, x, rotation = block_of(), torch.randn(2, 5, HIDDEN), rotation_at(torch.arange(5), HEAD_DIM)
    state = block.attention.init_state(2)
    rotated = block(x, rotation)
    block.rotary = False
    torch.testing.assert_close(block(x, rotation), block(x))
    torch.testing.assert_close(block.extend(x, state, rotation)[0], block(x))
    torch.testing.assert_close(block.attention_inputs(x, rotation)[0], block.attention_inputs(x)[0])
    assert not torch.allclose(rotated, block(x))


def test_a_gated_mechanism_is_given_the_layers_input():
    block = block_of("polysketch-paper", decay_gate=True, hidden_size=HIDDEN, local_chunk=None)
    x = torch.randn(1, 6, HIDDEN)
    before = block(x)
    block.attention.mechanism.decay_gate.bias.data.fill_(-5)
    assert not torch.allclose(block(x)[:, 1:], before[:, 1:])


def test_residual_outputs_are_scaled_at_initialisation():
    torch.manual_seed(0)
    layer = SelfAttention(256, attention.build("softmax", num_heads=4, head_dim=64))
    layer.reset_parameters(residual_scale=0.25)
    assert layer.output.weight.std().item() == pytest.approx(0.25 / 16, rel=0.03)
    assert layer.query_key_value.weight.std().item() == pytest.approx(1 / 16, rel=0.03)
