"""Exact softmax in aligned chunks joined with sums from elsewhere: the definition by all weights, gradients, ranges."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from polysketch.ops.local_softmax import RemainingSums, local_softmax_attention

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def tensors(length: int, *, heads: int = 4, key_heads: int = 2, head_dim: int = 5, value_dim: int = 3, batch: int = 2):
    """Query, key, value with its column of ones, sums and log_scale of the rest, float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator, dtype=torch.float64)

    query, key, value = (
        draw(heads, length, head_dim),
        draw(key_heads, length, head_dim),
        draw(key_heads, length, value_dim),
    )
    value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    mass = 3 * draw(heads, length, 1).exp()
    sums = torch.cat([mass * draw(heads, length, value_dim), mass], -1)
    return [query, key, value, sums, 0.5 * draw(heads, length)]


def attend(query, key, value, sums, log_scale, **options) -> tuple[Tensor, Tensor]:
    return local_softmax_attention(query, key, value, RemainingSums(sums, log_scale), **options)


def by_all_weights(query, key, value, sums, log_scale, *, chunk: int, causal: bool, key_mask: Tensor | None = None):
    """The formula, chunks counted from each row's first real token."""
    group, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    mask = torch.ones(query.shape[0], length, dtype=torch.bool) if key_mask is None else key_mask
    position = torch.arange(length) - (mask.cumsum(1) == 0).sum(1, keepdim=True)
    chunk_of = torch.div(position, chunk, rounding_mode="floor")
    seen = (chunk_of[:, :, None] == chunk_of[:, None, :]) & mask[:, None, :]
    seen = seen.tril() if causal else seen
    weights = (query @ key.mT).exp() * seen[:, None]
    rest = sums * log_scale.exp()[..., None]
    total = weights.sum(-1) + rest[..., -1]
    output = (weights @ value[..., :-1] + rest[..., :-1]) / total.masked_fill(total == 0, 1.0)[..., None]
    return output, rest[..., -1] / total.masked_fill(total == 0, 1.0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (12, 4), (13, 4), (30, 7), (9, 1), (9, 100)])
def test_it_is_the_formula(length: int, chunk: int, causal: bool):
    inputs = tensors(length)
    expected = by_all_weights(*inputs, chunk=chunk, causal=causal)
    for found, right in zip(attend(*inputs, chunk=chunk, causal=causal), expected, strict=True):
        torch.testing.assert_close(found, right, **TIGHT)


@pytest.mark.parametrize("causal", [True, False])
def test_masked_tokens_have_no_weight_and_padding_before_a_row_moves_its_chunks(causal: bool):
    inputs = tensors(23)
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[0, :5] = mask[1, 9:11] = False
    inputs[2] = inputs[2].masked_fill(~mask[:, None, :, None], 0.0)
    expected = by_all_weights(*inputs, chunk=6, causal=causal, key_mask=mask)
    inputs[1] = inputs[1].masked_fill(~mask[:, None, :, None], torch.nan)
    found = attend(*inputs, chunk=6, causal=causal, key_mask=mask)
    for one, right in zip(found, expected, strict=True):
        torch.testing.assert_close(one[0, :, 5:], right[0, :, 5:], **TIGHT)
        torch.testing.assert_close(one[1], right[1], **TIGHT)


def test_where_the_rest_is_nothing_it_is_softmax_attention_to_rounding_and_its_share_zero():
    query, key, value, sums, log_scale = tensors(8)
    output, share = attend(query, key, value, torch.zeros_like(sums), log_scale, chunk=8, causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value[..., :-1], is_causal=True, scale=1.0, enable_gqa=True
    )
    torch.testing.assert_close(output, expected, **TIGHT)
    assert not share.any()


def test_a_query_that_sees_nothing_gets_zeros_and_a_share_of_zero():
    query, key, value, sums, log_scale = tensors(8)
    mask = torch.zeros(2, 8, dtype=torch.bool)
    for found in attend(query, key, 0 * value, 0 * sums, log_scale, chunk=4, causal=True, key_mask=mask):
        assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_reach_everything_and_are_the_numerical_ones(causal: bool):
    query, key, value, sums, log_scale = (x.requires_grad_() for x in tensors(7, batch=1))

    def outputs(query, key, value, sums, log_scale):
        ones = torch.cat([value[..., :-1], torch.ones_like(value[..., :1])], -1)
        return attend(query, key, ones, sums, log_scale, chunk=3, causal=causal)

    assert torch.autograd.gradcheck(outputs, (query, key, value, sums, log_scale), fast_mode=True)


@pytest.mark.parametrize("shift", [-3e4, -300.0, 300.0, 3e4])
def test_no_exponential_overflows_whichever_side_is_the_larger(shift: float):
    query, key, value, sums, log_scale = (x.float() for x in tensors(20))
    output, share = attend(query, key, value, sums, log_scale + shift, chunk=5, causal=True)
    mean = sums[..., :-1] / sums[..., -1:]
    local, _ = attend(query, key, value, 0 * sums, log_scale, chunk=5, causal=True)
    torch.testing.assert_close(output, mean if shift > 0 else local, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(share, torch.full_like(share, float(shift > 0)))


def test_autocast_does_not_touch_it():
    inputs = [x.float() for x in tensors(20)]
    expected = attend(*inputs, chunk=5, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(*inputs, chunk=5, causal=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_no_matrix_of_length_times_chunk_is_in_memory():
    length, chunk = 4096, 2048
    inputs = [x.float().requires_grad_() for x in tensors(length, heads=1, key_heads=1, batch=1)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        attend(*inputs, chunk=chunk, causal=True)[0].sum().backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    in_use = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        peak = max(peak, in_use)
    assert 8 * length < peak < 4 * length * chunk / 4
