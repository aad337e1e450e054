"""Focused attention against the paper's formulas written out, its means, its convolution in every use, its range."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.cases import BATCH, HEAD_DIM
from attention.convolved_formulas import (
    EPSILON,
    HEADS,
    KV_HEADS,
    LENGTH,
    SIZE,
    build,
    convolved,
    inputs,
    mean_attention,
)
from polysketch import attention


def focused(x: Tensor, scale: Tensor) -> Tensor:
    """The paper's function of one token's heads (heads, head_dim): norms over all of them."""
    y = (x.clamp(min=0) + 1e-6) / scale
    return y.norm() * y**3 / (y**3).norm()


def all_tokens(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of every token's (heads, head_dim)."""
    return torch.stack([torch.stack([function(row[:, i]) for i in range(x.shape[2])], 1) for row in x])


def transcription(mechanism: attention.Mechanism, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """The whole of it for one query head to a key head."""
    scale = F.softplus(mechanism.feature_map.scale.weight)
    features = (all_tokens(lambda token: focused(token, scale), x) for x in (query, key))
    everything = slice(None)
    attended = mean_attention(*features, value, (lambda i: slice(i + 1)) if causal else lambda i: everything)
    first = (lambda i: range(i - SIZE + 1, i + 1)) if causal else lambda i: range(i - SIZE // 2, i + SIZE // 2 + 1)
    return attended + convolved(mechanism, value, first)


@pytest.mark.parametrize("faint", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_focused_attention_is_the_papers_formula(causal: bool, faint: bool):
    mechanism, (query, key, value) = build(), inputs(faint=faint)
    output = mechanism(query, key, value, causal=causal)
    for member in range(HEADS // KV_HEADS):
        mine = slice(member, None, HEADS // KV_HEADS)
        expected = transcription(mechanism, query[:, mine], key, value, causal)
        torch.testing.assert_close(output[:, mine], expected, rtol=1e-9, atol=1e-11)


def test_faint_weights_are_of_the_size_of_the_epsilon():
    mechanism, (query, key, value) = build(), inputs(faint=True)
    mechanism.convolution.weight.data.zero_()
    mechanism.convolution.bias.data.zero_()
    query_features, key_features = mechanism.feature_map.map_both(query, key)
    means = (query_features * key_features.repeat_interleave(HEADS // KV_HEADS, 1)).sum(-1)
    share = means / (means + EPSILON)
    assert 0.1 < share.median() < 0.9
    ones = mechanism(query, key, torch.ones_like(value), causal=False)
    assert 0.1 < ones.median() < 0.9


@pytest.mark.parametrize("name", ["focused", "polarity"])
def test_tokens_given_twice_have_the_mean_they_have_once(name: str):
    mechanism, tokens = build(name), inputs(faint=True)
    mechanism.convolution.weight.data.zero_()
    once = mechanism(*tokens, causal=False)
    twice = mechanism(*(torch.cat([x, x], 2) for x in tokens), causal=False)
    torch.testing.assert_close(twice, torch.cat([once, once], 2))


@pytest.mark.parametrize("name", ["focused", "polarity"])
def test_masked_tokens_are_not_counted_in_the_mean(name: str):
    mechanism, tokens = build(name), inputs(faint=True)
    mechanism.convolution.weight.data.zero_()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[:, [0, 1, 5, 6, 7]] = False
    kept = tuple(x[:, :, mask[0]] for x in tokens)
    for causal in (True, False):
        output = mechanism(*tokens, key_mask=mask, causal=causal)
        torch.testing.assert_close(output[:, :, mask[0]], mechanism(*kept, causal=causal))
    state, outputs = mechanism.init_state(BATCH, dtype=torch.float64), []
    for start, end in ((0, 6), (6, 7), (7, 8), (8, LENGTH)):
        piece = (x[:, :, start:end] for x in tokens)
        outputs.append(mechanism.extend(*piece, state, key_mask=mask[:, start:end])[0])
    torch.testing.assert_close(torch.cat(outputs, 2)[:, :, mask[0]], mechanism(*kept))
    assert state.count.tolist() == [LENGTH - 5] * BATCH


@pytest.mark.parametrize("name", ["focused", "polarity"])
def test_decoding_divides_by_the_number_of_keys_so_far(name: str):
    mechanism, tokens = build(name), inputs(faint=True)
    state = mechanism.init_state(BATCH, dtype=torch.float64)
    pieces = zip(*(x.split([1, 1, 7, 1, 2], 2) for x in tokens), strict=True)
    output = torch.cat([mechanism.extend(*piece, state)[0] for piece in pieces], 2)
    torch.testing.assert_close(output, mechanism(*tokens))


@pytest.mark.parametrize("name", ["focused", "polarity"])
def test_the_state_is_updated_at_its_addresses_and_does_not_grow(name: str):
    mechanism, tokens = build(name), inputs()
    state = mechanism.init_state(BATCH, dtype=torch.float64)
    before = state.nbytes, state.tail.data_ptr(), state.count.data_ptr(), state.attention.sums.data_ptr()
    mechanism.extend(*tokens, state)
    assert before == (state.nbytes, state.tail.data_ptr(), state.count.data_ptr(), state.attention.sums.data_ptr())
    assert torch.equal(state.tail, tokens[2][:, :, -(SIZE - 1) :])
    copies = state.clone(), state.reorder(torch.tensor([1, 0]))
    mechanism.extend(*inputs(seed=2), state)
    assert torch.equal(copies[0].tail, tokens[2][:, :, -(SIZE - 1) :])
    assert copies[0].count.tolist() == [LENGTH] * BATCH
    assert torch.equal(copies[1].tail, copies[0].tail.flip(0))


@pytest.mark.parametrize("name", ["focused", "polarity"])
def test_on_a_grid_the_convolution_is_that_of_the_picture(name: str):
    grid = (4, 3)
    mechanism, tokens = build(name, grid=grid), inputs()
    output = mechanism(*tokens, causal=False)
    weight, bias = mechanism.convolution.weight.clone(), mechanism.convolution.bias.clone()
    for parameter in mechanism.convolution.parameters():
        parameter.data.zero_()
    pictures = tokens[2].flatten(0, 1).mT.unflatten(2, grid)  # as in the paper's code: heads in the batch
    expected = F.conv2d(pictures, weight.transpose(0, 1), bias, padding=SIZE // 2, groups=HEAD_DIM)
    expected = expected.flatten(2).mT.unflatten(0, (BATCH, KV_HEADS)).repeat_interleave(HEADS // KV_HEADS, 1)
    torch.testing.assert_close(output - mechanism(*tokens, causal=False), expected)


@pytest.mark.parametrize("name", ["focused", "polarity"])
def test_class_tokens_before_a_grid_are_attended_to_and_not_convolved(name: str):
    plain, picture = build(name, convolution_size=3), build(name, convolution_size=3, grid=(3, 4), class_tokens=2)
    plain.feature_map.load_state_dict(picture.feature_map.state_dict())
    tokens = inputs(length=14)
    for mechanism in (plain, picture):
        for parameter in mechanism.convolution.parameters():
            parameter.data.zero_()
    attended = picture(*tokens, causal=False)
    torch.testing.assert_close(attended, plain(*tokens, causal=False))
    torch.nn.init.normal_(picture.convolution.weight)
    torch.nn.init.normal_(picture.convolution.bias)
    mask = torch.ones(BATCH, 14, dtype=torch.bool)
    mask[0, -1] = False
    masked = picture(*tokens, causal=False, key_mask=mask)
    blank = tokens[2].clone()
    blank[0, :, -1] = 0.0
    added = picture.convolution(blank, causal=False).repeat_interleave(HEADS // KV_HEADS, 1)
    torch.testing.assert_close(masked - plain(*tokens, causal=False, key_mask=mask), added)
    convolved = picture(*tokens, causal=False) - attended
    assert torch.equal(convolved[:, :, :2], torch.zeros_like(convolved[:, :, :2]))
    alone = build(name, convolution_size=3, grid=(3, 4)).convolution
    alone.load_state_dict(picture.convolution.state_dict())
    expected = alone(tokens[2][:, :, 2:], causal=False).repeat_interleave(HEADS // KV_HEADS, 1)
    torch.testing.assert_close(convolved[:, :, 2:], expected)


@pytest.mark.parametrize("name", ["focused", "polarity"])
def test_a_grid_is_bidirectional_only_and_of_its_own_length(name: str):
    mechanism, tokens = build(name, grid=(4, 3)), inputs()
    assert not mechanism.is_causal
    with pytest.raises(ValueError, match=r"grid=\(4, 3\) cannot be causal"):
        mechanism(*tokens)
    with pytest.raises(NotImplementedError, match=r"grid=\(4, 3\) cannot decode"):
        mechanism.init_state(BATCH)
    with pytest.raises(NotImplementedError, match=r"grid=\(4, 3\) cannot decode"):
        mechanism.extend(*tokens, None)
    with pytest.raises(ValueError, match="a grid of 4 x 3 holds 12 tokens, got a length of 13"):
        mechanism(*inputs(length=13), causal=False)


def test_options_that_do_not_fit_are_refused():
    for grid in (12, (4, 3, 2)):
        with pytest.raises(TypeError, match=r"grid must be \(height, width\) in tokens"):
            build(grid=grid)
    with pytest.raises(ValueError, match="grid_width must be at least 1, got 0"):
        build(grid=(4, 0))
    with pytest.raises(ValueError, match="class_tokens must be a number of tokens before a grid, got 1 and grid=None"):
        build(class_tokens=1)
    with pytest.raises(TypeError, match="class_tokens must be a number of tokens, got '1'"):
        build(grid=(4, 3), class_tokens="1")
    with pytest.raises(ValueError, match="convolution_size must be odd on a grid"):
        build(grid=(4, 3), convolution_size=4)
    with pytest.raises(ValueError, match="convolution_size must be at least 1, got 0"):
        build(convolution_size=0)
    with pytest.raises(ValueError, match="odd number of taps to have a middle, got 4"):
        build(convolution_size=4)(*inputs(), causal=False)
    assert build(convolution_size=4)(*inputs()).isfinite().all()
    query, key, value = inputs()
    with pytest.raises(ValueError, match="as many keys as queries are expected, got 12 queries and 11 keys"):
        build()(query, key[:, :, 1:], value[:, :, 1:], causal=False)


@pytest.mark.parametrize("name", ["focused", "polarity"])
@pytest.mark.parametrize("width", [3, HEAD_DIM + 5])
def test_channels_of_a_value_of_another_width_take_the_filters_over_and_over(name: str, width: int):
    mechanism, (query, key, value) = build(name), inputs()
    wide = torch.cat([value, value.flip(3)], 3)[..., :width]
    for parameter in mechanism.feature_map.parameters():
        parameter.data.zero_()
    nothing = torch.zeros_like(key)  # no weight on any key: the convolution alone, but for focused's equal weights
    channels = [mechanism(query, nothing, wide[..., [c] * HEAD_DIM])[..., c % HEAD_DIM] for c in range(width)]
    torch.testing.assert_close(mechanism(query, nothing, wide), torch.stack(channels, 3))


@pytest.mark.parametrize("name", ["focused", "polarity"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_the_range_that_powers_need(name: str, dtype: torch.dtype):
    mechanism = build(name).to(dtype)
    tokens = tuple((scale * x).to(dtype) for scale, x in zip((300, 300, 1), inputs(), strict=True))
    output = mechanism(*tokens)
    exact = build(name)
    exact.load_state_dict(mechanism.state_dict())
    expected = exact(*(x.double() for x in tokens))
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.full  # causal ones are seen by the contract
@pytest.mark.parametrize("name", ["focused", "polarity"])
@pytest.mark.parametrize("causal", [True, False])
def test_convolved_mechanisms_compile_into_one_graph(name: str, causal: bool):
    mechanism, tokens = build(name).float(), tuple(x.float() for x in inputs())
    compiled = torch.compile(mechanism, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tokens, causal=causal), mechanism(*tokens, causal=causal))
