"""Polarity attention against the paper's formulas written out: signs, halves of the value, and the gate."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.cases import BATCH, HEAD_DIM, HIDDEN
from attention.convolved_formulas import HEADS, KV_HEADS, LENGTH, SIZE, build, convolved, inputs, mean_attention
from polysketch import attention
from polysketch.attention.token_convolution import TokenConvolution

GROUP = HEADS // KV_HEADS


def hidden_states() -> Tensor:
    return torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def transcription(mechanism: attention.Mechanism, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Without the gate, every key/value head repeated for the query heads that it serves."""
    scale, exponent = mechanism.feature_map.scale.weight, mechanism.feature_map.exponent
    scale, power = (x.repeat_interleave(GROUP, 0)[:, None] for x in (F.softplus(scale), 1 + 4 * exponent.sigmoid()))
    key, value = (x.repeat_interleave(GROUP, 1) for x in (key, value))
    query_plus, query_minus, key_plus, key_minus = (
        (sign * x / scale).clamp(min=0) ** power for x in (query, key) for sign in (1, -1)
    )
    keys, everything = torch.cat([key_plus, key_minus], -1), slice(None)
    seen = (lambda i: slice(i + 1)) if causal else lambda i: everything
    first, second = value.split([-(-value.shape[3] // 2), value.shape[3] // 2], -1)
    same = mean_attention(torch.cat([query_plus, query_minus], -1), keys, first, seen)
    opposite = mean_attention(torch.cat([query_minus, query_plus], -1), keys, second, seen)
    near = (lambda i: range(i - SIZE + 1, i + 1)) if causal else lambda i: range(i - SIZE // 2, i + SIZE // 2 + 1)
    return torch.cat([same, opposite], -1) + convolved(mechanism, value, near)


@pytest.mark.parametrize("scale", [1.0, 0.03])
@pytest.mark.parametrize("causal", [True, False])
def test_polarity_attention_is_the_papers_formula(causal: bool, scale: float):
    mechanism, (query, key, value) = build("polarity"), inputs()
    query, key = scale * query, scale * key  # small ones have means of weights about the 1e-6 added to them
    output = mechanism(query, key, value, causal=causal)
    torch.testing.assert_close(output, transcription(mechanism, query, key, value, causal), rtol=1e-9, atol=1e-11)


def test_the_gate_multiplies_every_channel_of_every_query_head_by_a_linear_map_of_the_input():
    mechanism, tokens, hidden = build("polarity", output_gate=True, hidden_size=HIDDEN), inputs(), hidden_states()
    gates = (hidden @ mechanism.output_gate.weight.mT).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
    expected = transcription(mechanism, *tokens, True) * gates
    torch.testing.assert_close(mechanism(*tokens, hidden=hidden), expected, rtol=1e-9, atol=1e-11)
    assert gates.min() < 0  # no activation
    state, outputs = mechanism.init_state(BATCH, dtype=torch.float64), []
    for span in (slice(0, 5), slice(5, 6), slice(6, LENGTH)):
        piece = (x[:, :, span] for x in tokens)
        outputs.append(mechanism.extend(*piece, state, hidden=hidden[:, span])[0])
    torch.testing.assert_close(torch.cat(outputs, 2), expected, rtol=1e-9, atol=1e-11)


def test_gradients_of_the_gate_reach_the_input():
    mechanism, tokens, hidden = (
        build("polarity", output_gate=True, hidden_size=HIDDEN),
        inputs(length=4),
        hidden_states(),
    )

    def attend(hidden: Tensor, weight: Tensor) -> Tensor:
        weights = {"output_gate.weight": weight}
        return torch.func.functional_call(mechanism, weights, tokens, {"hidden": hidden})

    hidden = hidden[:, :4].clone().requires_grad_()
    assert torch.autograd.gradcheck(attend, (hidden, mechanism.output_gate.weight), fast_mode=True)


def test_an_odd_value_has_one_channel_more_in_its_first_half():
    mechanism, (query, key, value) = build("polarity"), inputs()
    mechanism.convolution, value = TokenConvolution(5, SIZE).double(), value[..., :5]
    expected = transcription(mechanism, query, key, value, True)
    torch.testing.assert_close(mechanism(query, key, value), expected, rtol=1e-9, atol=1e-11)


def test_a_query_of_zeros_gives_the_convolution_alone_and_finite_gradients():
    mechanism, (query, key, value) = build("polarity"), inputs()
    query[:, :, 3] = 0
    key[:, :, 1] = 0
    output = mechanism(query.requires_grad_(), key.requires_grad_(), value)
    expected = convolved(mechanism, value, lambda i: range(i - SIZE + 1, i + 1)).repeat_interleave(GROUP, 1)
    torch.testing.assert_close(output[:, :, 3], expected[:, :, 3])
    output.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, *mechanism.parameters()))


def test_same_signs_read_the_first_half_of_the_value_and_opposite_signs_the_second():
    mechanism, (query, key, value) = build("polarity"), inputs()
    for parameter in mechanism.convolution.parameters():
        parameter.data.zero_()
    half = HEAD_DIM // 2
    output = mechanism(query.abs(), key.abs(), value)
    assert output[..., :half].ne(0).all()
    assert output[..., half:].eq(0).all()
    output = mechanism(query.abs(), -key.abs(), value)
    assert output[..., :half].eq(0).all()
    assert output[..., half:].ne(0).all()


def test_a_gate_without_its_input_is_refused():
    with pytest.raises(ValueError, match="output_gate=True needs hidden_size"):
        build("polarity", output_gate=True)
    with pytest.raises(TypeError, match="output_gate must be True or False, got 1"):
        build("polarity", output_gate=1, hidden_size=HIDDEN)
    with pytest.raises(ValueError, match="hidden_size must be at least 1, got 0"):
        build("polarity", output_gate=True, hidden_size=0)
    mechanism, tokens = build("polarity", output_gate=True, hidden_size=HIDDEN), inputs()
    with pytest.raises(ValueError, match=r"needs hidden=\(batch, length, 6\), got nothing"):
        mechanism(*tokens)
    with pytest.raises(ValueError, match=r"needs hidden=\(batch, length, 6\), got \(2, 12, 5\)"):
        mechanism(*tokens, hidden=hidden_states()[..., :5])
