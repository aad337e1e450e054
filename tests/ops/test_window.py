"""Sliding windows and local chunks against masked attention written out, and what they refuse."""

import pytest
import torch
from torch import Tensor

from polysketch import ops
from polysketch.ops import window as window_module

TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}
LENGTHS = [1, 2, 63, 65, 300]


def tensors(length=37, batch=2, heads=4, key_heads=2, head_dim=8, value_dim=5, seed=0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, length, head_dim), (key_heads, length, head_dim), (key_heads, length, value_dim)]
    return [torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def padding(length: int) -> Tensor:
    """The second row starts late and has a masked token in its middle."""
    mask = torch.arange(length) >= torch.tensor([0, min(5, length - 1)])[:, None]
    mask[1, length // 2] = False
    return mask


def weighted(weights: Tensor, allowed: Tensor, value: Tensor, offset: float) -> Tensor:
    """sum_j w_ij v_j / (offset + sum_j w_ij) over what is allowed; zeros where nothing is."""
    weights = torch.where(allowed, weights, 0.0)
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
    mass = offset + weights.sum(-1, keepdim=True)
    return weights @ value / mass.masked_fill(mass == 0, 1.0)


def scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT


def windowed(query: Tensor, key: Tensor, value: Tensor, window: int, causal: bool, mask: Tensor | None) -> Tensor:
    """The definition, by the full matrix."""
    position = torch.arange(key.shape[2])
    age = position[-query.shape[2] :, None] - position
    allowed = ((age >= 0) | (not causal)) & (age.abs() < window)
    allowed = allowed & (True if mask is None else mask[:, None, None, :])
    return weighted((scores(query, key) * query.shape[3] ** -0.5).exp(), allowed, value, 0.0)


def chunked(query: Tensor, key: Tensor, value: Tensor, chunk: int, causal: bool, mask: Tensor | None) -> Tensor:
    """The definition, by the full matrix, for degree 4 and an offset of 1."""
    length = key.shape[2]
    real = torch.ones(key.shape[0], length, dtype=torch.bool) if mask is None else mask
    position = torch.arange(length) - (real.cumsum(1) == 0).sum(1, keepdim=True)
    number = position.div(chunk, rounding_mode="floor")
    allowed = (number[:, :, None] == number[:, None, :]) & real[:, None, :] & (position >= 0)[:, :, None]
    allowed = allowed.tril() if causal else allowed
    return weighted(scores(query, key) ** 4, allowed[:, None], value, 1.0)


def assert_same_with_gradients(compute, expect, inputs: list[Tensor]) -> None:
    inputs = [x.requires_grad_() for x in inputs]
    results = [function(*inputs) for function in (compute, expect)]
    torch.testing.assert_close(*results, **TOLERANCE)
    upstream = torch.randn(results[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(result, inputs, upstream) for result in results]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", [1, 2, 16, 70])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_a_sliding_window_is_masked_softmax(monkeypatch, length, window, causal, masked):
    monkeypatch.setattr(window_module, "_ROWS", 32)  # several row blocks, the last one shorter
    mask = padding(length) if masked else None
    assert_same_with_gradients(
        lambda q, k, v: ops.sliding_window_attention(q, k, v, window=window, causal=causal, key_mask=mask),
        lambda q, k, v: windowed(q, k, v, window, causal, mask),
        tensors(length),
    )


def with_one_more(query, key, value, logit, other, window, causal, mask) -> Tensor:
    """The definition, by the full matrix with one more column."""
    position = torch.arange(key.shape[2])
    age = position[-query.shape[2] :, None] - position
    allowed = ((age >= 0) | (not causal)) & (age.abs() < window)
    allowed = allowed & (True if mask is None else mask[:, None, None, :])
    logits = (scores(query, key) * query.shape[3] ** -0.5).masked_fill(~allowed, float("-inf"))
    weights = torch.cat([logits, logit[..., None]], -1).softmax(-1)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return weights[..., :-1] @ value + weights[..., -1:] * other


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", [1, 16, 70])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_a_key_beside_the_window_is_one_more_column_of_the_softmax(monkeypatch, length, window, causal, masked):
    monkeypatch.setattr(window_module, "_ROWS", 32)
    mask = padding(length) if masked else None
    generator = torch.Generator().manual_seed(2)
    beside = [torch.randn(2, 4, length, *more, generator=generator, dtype=torch.float64) for more in ((), (5,))]
    assert_same_with_gradients(
        lambda q, k, v, logit, other: ops.sliding_window_attention(
            q, k, v, window=window, causal=causal, key_mask=mask, beside=ops.BesideKey(logit, other)
        ),
        lambda q, k, v, logit, other: with_one_more(q, k, v, logit, other, window, causal, mask),
        [*tensors(length), *beside],
    )


def test_a_key_beside_of_logit_minus_infinity_is_none():
    query, key, value = tensors()
    mask = padding(37)
    beside = ops.BesideKey(torch.full(query.shape[:3], float("-inf"), dtype=torch.float64), torch.ones(2, 4, 37, 5))
    options = {"window": 9, "causal": True, "key_mask": mask}
    output = ops.sliding_window_attention(query, key, value, **options, beside=beside)
    torch.testing.assert_close(output, ops.sliding_window_attention(query, key, value, **options), **TOLERANCE)
    assert output[1, :, :5].eq(0).all()  # padding before the row's first token sees nothing


def test_a_key_beside_of_another_shape_is_refused():
    query, key, value = tensors()
    with pytest.raises(ValueError, match=r"expected a logit and a value of .*\(2, 4, 37\)"):
        ops.sliding_window_attention(query, key, value, window=9, beside=ops.BesideKey(query[..., 0], query))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [37, 38, 4000])
def test_a_window_of_the_length_or_more_is_softmax(window, causal):
    inputs = tensors()
    output = ops.sliding_window_attention(*inputs, window=window, causal=causal)
    torch.testing.assert_close(output, ops.softmax_attention(*inputs, causal=causal), **TOLERANCE)


@pytest.mark.parametrize("count", [1, 20, 100])
@pytest.mark.parametrize("masked", [True, False])
def test_a_cache_of_one_token_less_than_the_window_is_enough(monkeypatch, count, masked):
    monkeypatch.setattr(window_module, "_ROWS", 32)
    query, key, value = tensors(100)
    mask, window = padding(100) if masked else None, 9
    whole = ops.sliding_window_attention(query, key, value, window=window, causal=True, key_mask=mask)
    for kept in (count, min(count + window - 1, 100), 100):
        output = ops.sliding_window_attention_with_cache(
            query[:, :, -count:],
            key[:, :, -kept:],
            value[:, :, -kept:],
            window=window,
            key_mask=None if mask is None else mask[:, -kept:],
        )
        same = output.shape[2] if kept > count or count == 100 else max(0, count - window + 1)
        torch.testing.assert_close(output[:, :, count - same :], whole[:, :, 100 - same :], **TOLERANCE)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("chunk", [1, 16, 64, 300])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_local_attention_is_its_definition(length, chunk, causal, masked):
    mask = padding(length) if masked else None
    assert_same_with_gradients(
        lambda q, k, v: ops.local_attention(q, k, v, chunk=chunk, causal=causal, key_mask=mask),
        lambda q, k, v: chunked(q, k, v, chunk, causal, mask),
        tensors(length),
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [37, 38, 4000])
def test_a_chunk_of_the_length_or_more_is_polynomial_attention(chunk, causal):
    inputs = tensors()
    options = {"degree": 2, "offset": 0.3, "causal": causal}
    output = ops.local_attention(*inputs, chunk=chunk, **options)
    torch.testing.assert_close(output, ops.polynomial_attention(*inputs, **options), **TOLERANCE)


@pytest.mark.parametrize("split", [1, 7, 8, 9, 30])
def test_tokens_behind_an_open_chunk_go_on_in_it(split):
    query, key, value = tensors(40)
    whole = ops.local_attention(query, key, value, chunk=8, causal=True)
    start = split - split % 8
    opened = [torch.nn.functional.pad(x[:, :, start:split], (0, 0, 0, 8 - split % 8), value=7.0) for x in (key, value)]
    rest = (x[:, :, split:] for x in (query, key, value))
    opened = ops.OpenChunk(*opened, torch.full((2,), split))
    output = ops.local_attention(*rest, chunk=8, causal=True, opened=opened)
    torch.testing.assert_close(output, whole[:, :, split:], **TOLERANCE)


def test_local_attention_is_the_local_part_of_linear_attention():
    query, key, value = tensors(50)
    features = query.new_zeros(2, 4, 50, 1), key.new_zeros(2, 2, 50, 1)
    local = ops.LocalPolynomial(query, key, 4, 16)
    expected = ops.linear_attention(*features, value, causal=True, offset=1.0, local=local, key_mask=padding(50)).output
    output = ops.local_attention(query, key, value, chunk=16, causal=True, key_mask=padding(50))
    torch.testing.assert_close(output, expected, **TOLERANCE)


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_as_large_as_the_matrix_of_all_pairs_is_ever_allocated(causal):
    length = 4096
    inputs = [x.float() for x in tensors(length, batch=1, heads=1, key_heads=1)]
    for attend in (
        lambda: ops.sliding_window_attention(*inputs, window=8, causal=causal),
        lambda: ops.local_attention(*inputs, chunk=8, causal=causal),
    ):
        with torch.profiler.profile(profile_memory=True) as profile:
            attend()
        largest = max(event.cpu_memory_usage for event in profile.events())
        assert 0 < largest < length * length / 4  # bytes: a mask of all pairs would be four times that


def test_what_does_not_fit_is_refused_in_one_line():
    query, key, value = tensors()
    for wrong, error in ((0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"window must be (at least 1|an integer), got {wrong}"):
            ops.sliding_window_attention(query, key, value, window=wrong)
        with pytest.raises(error, match=f"chunk must be (at least 1|an integer), got {wrong}"):
            ops.local_attention(query, key, value, chunk=wrong)
    for attend in (lambda *x: ops.sliding_window_attention(*x, window=3), ops.local_attention):
        with pytest.raises(ValueError, match="as many queries as keys, got 5 queries and 37 keys"):
            attend(query[:, :, :5], key, value)
    with pytest.raises(ValueError, match="at most as many queries as keys"):
        ops.sliding_window_attention_with_cache(query, key[:, :, :5], value[:, :, :5], window=3)
    opened = ops.OpenChunk(key[:, :, :8], value[:, :, :8], torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="needs causal=True"):
        ops.local_attention(query, key, value, chunk=8, opened=opened)
