"""Softmax attention: the definition, its masks, and what it refuses."""

import pytest
import torch
from torch import Tensor

from polysketch.ops.softmax import softmax_attention, softmax_attention_with_cache

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def definition(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float | None = None) -> Tensor:
    """Softmax attention written out; ``allowed`` broadcasts to (batch, heads, query_length, key_length)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.where(allowed, scores.exp(), 0.0)
    return weights @ value / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def tensors(length=37, key_length=None, heads=4, key_heads=2, head_dim=8, value_dim=8, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, length, head_dim), (key_heads, key_length or length, head_dim)]
    shapes.append((key_heads, key_length or length, value_dim))
    return [torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def left_padding(length: int, missing: list[int]) -> Tensor:
    return torch.arange(length) >= torch.tensor(missing)[:, None]


def causal_mask(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value_dim", [3, 8, 13])
@pytest.mark.parametrize("masked", [False, True])
def test_output_and_every_gradient_are_those_of_the_definition(causal, value_dim, masked):
    inputs = [tensor.requires_grad_() for tensor in tensors(value_dim=value_dim)]
    key_mask = left_padding(37, [0, 9]) if masked else None
    allowed = causal_mask(37, 37) if causal else torch.ones(37, 37, dtype=torch.bool)
    allowed = allowed & (key_mask[:, None, None, :] if masked else True)
    output = softmax_attention(*inputs, causal=causal, key_mask=key_mask, scale=0.3)
    expected = definition(*inputs, allowed, scale=0.3)
    torch.testing.assert_close(output, expected, **TOLERANCE)
    upstream = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(output, inputs, upstream)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(gradient, reference, **TOLERANCE)


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("masked", [False, True])
def test_a_scale_may_be_zero_or_negative(scale, masked):
    inputs = tensors()
    key_mask = left_padding(37, [0, 9]) if masked else None
    for causal in (False, True):
        allowed = causal_mask(37, 37) if causal else torch.ones(37, 37, dtype=torch.bool)
        allowed = allowed & (key_mask[:, None, None, :] if masked else True)
        output = softmax_attention(*inputs, causal=causal, key_mask=key_mask, scale=scale)
        torch.testing.assert_close(output, definition(*inputs, allowed, scale=scale), **TOLERANCE)


def test_the_default_scale_is_one_over_the_root_of_the_head_size_whatever_the_value_width():
    for value_dim in (3, 8, 13):
        inputs = tensors(value_dim=value_dim)
        expected = definition(*inputs, torch.ones(37, 37, dtype=torch.bool))
        torch.testing.assert_close(softmax_attention(*inputs), expected, **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_without_a_real_key_gives_zeros_and_finite_gradients(causal):
    inputs = [tensor.requires_grad_() for tensor in tensors()]
    output = softmax_attention(*inputs, causal=causal, key_mask=left_padding(37, [37, 5]))
    assert torch.equal(output[0], torch.zeros_like(output[0]))
    assert not causal or torch.equal(output[1, :, :5], torch.zeros_like(output[1, :, :5]))
    assert output[1, :, 5:].abs().min() > 0
    for gradient in torch.autograd.grad(output.square().sum(), inputs):
        assert gradient.isfinite().all()
        assert torch.equal(gradient[0], torch.zeros_like(gradient[0]))


def test_left_padding_changes_nothing():
    query, key, value = tensors(batch=1)
    padded = [torch.nn.functional.pad(tensor, (0, 0, 6, 0), value=3.0) for tensor in (query, key, value)]
    output = softmax_attention(*padded, causal=True, key_mask=left_padding(43, [6]))
    torch.testing.assert_close(output[:, :, 6:], softmax_attention(query, key, value, causal=True), **TOLERANCE)


@pytest.mark.parametrize("split", [1, 5, 36, 37])
@pytest.mark.parametrize("masked", [False, True])
def test_the_last_queries_over_a_cache_give_the_last_rows_of_the_causal_whole(split, masked):
    query, key, value = tensors(value_dim=5)
    key_mask = left_padding(37, [0, 9]) if masked else None
    whole = softmax_attention(query, key, value, causal=True, key_mask=key_mask)
    last = softmax_attention_with_cache(query[:, :, -split:], key, value, key_mask=key_mask)
    torch.testing.assert_close(last, whole[:, :, -split:], **TOLERANCE)


def test_masked_causal_attention_is_the_same_over_several_row_blocks():
    query, key, value = (tensor.float() for tensor in tensors(length=2100, heads=1, key_heads=1, batch=1))
    key_mask = torch.rand(1, 2100, generator=torch.Generator().manual_seed(2)) < 0.8
    allowed = causal_mask(2100, 2100) & key_mask[:, None, None, :]
    output = softmax_attention(query, key, value, causal=True, key_mask=key_mask)
    expected = definition(query.double(), key.double(), value.double(), allowed)
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


def test_hand_computed_values():
    query = torch.tensor([[[[0.0], [1.0]]]])
    key = torch.tensor([[[[0.0], [torch.log(torch.tensor(3.0))]]]])
    value = torch.tensor([[[[4.0], [8.0]]]])
    full = softmax_attention(query, key, value)  # weights 1/2, 1/2 and 1/4, 3/4
    torch.testing.assert_close(full.flatten(), torch.tensor([6.0, 7.0]))
    causal = softmax_attention(query, key, value, causal=True)
    torch.testing.assert_close(causal.flatten(), torch.tensor([4.0, 7.0]))


def test_autocast_computes_in_its_own_dtype_and_accepts_mixed_inputs():
    query, key, value = (tensor.float() for tensor in tensors())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = softmax_attention(query, key.bfloat16(), value, causal=True)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), softmax_attention(query, key, value, causal=True), rtol=0.1, atol=0.1)


def test_it_compiles_without_a_graph_break():
    query, key, value = tensors()
    compiled = torch.compile(softmax_attention, fullgraph=True, backend="eager")
    key_mask = left_padding(37, [0, 9])
    expected = softmax_attention(query, key, value, causal=True, key_mask=key_mask)
    torch.testing.assert_close(compiled(query, key, value, causal=True, key_mask=key_mask), expected, **TOLERANCE)


def test_arguments_that_do_not_belong_together_are_refused_in_one_line():
    query, key, value = tensors()
    mask = torch.ones(2, 37, dtype=torch.bool)
    with pytest.raises(ValueError, match="as many queries as keys, got 5 queries and 37 keys"):
        softmax_attention(query[:, :, :5], key, value, causal=True)
    with pytest.raises(ValueError, match="at most as many queries as keys, got 37 queries and 5 keys"):
        softmax_attention_with_cache(query, key[:, :, :5], value[:, :, :5])
    with pytest.raises(ValueError, match=r"must be \(batch, heads, length, width\), got the shape \(4, 37, 8\)"):
        softmax_attention(query[0], key, value)
    with pytest.raises(ValueError, match="at least one position"):
        softmax_attention(query, key[:, :, :0], value[:, :, :0])
    with pytest.raises(ValueError, match="must share the batch"):
        softmax_attention(query, key, value[:, :, :-1])
    with pytest.raises(ValueError, match="must share head_dim, got 7 and 8"):
        softmax_attention(query[..., :7], key, value)
    with pytest.raises(ValueError, match="multiple of the key heads, got 3 and 2"):
        softmax_attention(query[:, :3], key, value)
    with pytest.raises(TypeError, match="must share one dtype outside autocast"):
        softmax_attention(query, key.float(), value)
    with pytest.raises(TypeError, match="must be floating point"):
        softmax_attention(query.long(), key.long(), value.long())
    with pytest.raises(ValueError, match="must be on one device, got cpu, meta, cpu"):
        softmax_attention(query, key.to("meta"), value)
    with pytest.raises(TypeError, match="key_mask must be bool"):
        softmax_attention(query, key, value, key_mask=mask.float())
    with pytest.raises(ValueError, match=r"key_mask must be \(batch, key_length\) = \(2, 37\), got \(2, 36\)"):
        softmax_attention(query, key, value, key_mask=mask[:, 1:])
