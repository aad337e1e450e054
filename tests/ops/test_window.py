"""Sliding windows against masked attention written out, by every backend, and what they refuse."""

import pytest
import torch
from torch import Tensor

from attention.covering import pairs_always
from ops.window_cases import (
    LENGTHS,
    TOLERANCE,
    assert_no_matrix_of_all_pairs,
    assert_same_with_gradients,
    padding,
    scores,
    tensors,
    weighted,
)
from polysketch import ops
from polysketch.ops.native import why_unavailable

PLAIN = ["blockwise", "reference"]
"""Backends of every dtype, here of float64."""
needs_compiler = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


def windowed(query: Tensor, key: Tensor, value: Tensor, window: int, causal: bool, mask: Tensor | None) -> Tensor:
    """The definition, by the full matrix."""
    position = torch.arange(key.shape[2])
    age = position[-query.shape[2] :, None] - position
    allowed = ((age >= 0) | (not causal)) & (age.abs() < window)
    allowed = allowed & (True if mask is None else mask[:, None, None, :])
    return weighted((scores(query, key) * query.shape[3] ** -0.5).exp(), allowed, value, 0.0)


SIDES = {"causal": (True, False), "masked": (True, False), "backend": tuple(PLAIN)}


@pytest.mark.parametrize(
    ("length", "window", "causal", "masked", "backend"),
    pairs_always({"length": tuple(LENGTHS), "window": (1, 2, 16, 70), **SIDES}),
)
def test_a_sliding_window_is_masked_softmax(length, window, causal, masked, backend):
    mask = padding(length) if masked else None
    assert_same_with_gradients(
        lambda q, k, v: ops.sliding_window_attention(
            q, k, v, window=window, causal=causal, key_mask=mask, backend=backend
        ),
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


@pytest.mark.parametrize(
    ("length", "window", "causal", "masked", "backend"),
    pairs_always({"length": tuple(LENGTHS), "window": (1, 16, 70), **SIDES}),
)
def test_a_key_beside_the_window_is_one_more_column_of_the_softmax(length, window, causal, masked, backend):
    mask = padding(length) if masked else None
    generator = torch.Generator().manual_seed(2)
    beside = [torch.randn(2, 4, length, *more, generator=generator, dtype=torch.float64) for more in ((), (5,))]
    assert_same_with_gradients(
        lambda q, k, v, logit, other: ops.sliding_window_attention(
            q, k, v, window=window, causal=causal, key_mask=mask, beside=ops.BesideKey(logit, other), backend=backend
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


def test_a_key_beside_in_float32_serves_attention_in_float64():
    query, key, value = tensors()
    logit = torch.randn(query.shape[:3], generator=torch.Generator().manual_seed(2))
    other = torch.randn(2, 4, 37, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    narrow, wide = (
        ops.sliding_window_attention(query, key, value, window=9, beside=ops.BesideKey(x, other))
        for x in (logit, logit.double())
    )
    torch.testing.assert_close(narrow, wide, **TOLERANCE)


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
def test_a_cache_of_one_token_less_than_the_window_is_enough(count, masked):
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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["blockwise", pytest.param("native", marks=needs_compiler)])
def test_nothing_as_large_as_the_matrix_of_all_pairs_is_ever_allocated(causal, backend):
    inputs = [x.float() for x in tensors(4096, batch=1, heads=1, key_heads=1)]
    options = {"window": 8, "causal": causal, "backend": backend}
    assert_no_matrix_of_all_pairs(lambda: ops.sliding_window_attention(*inputs, **options), 4096)


def test_what_does_not_fit_is_refused_in_one_line():
    query, key, value = tensors()
    for wrong, error in ((0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"window must be (at least 1|an integer), got {wrong}"):
            ops.sliding_window_attention(query, key, value, window=wrong)
    with pytest.raises(ValueError, match="as many queries as keys, got 5 queries and 37 keys"):
        ops.sliding_window_attention(query[:, :, :5], key, value, window=3)
    with pytest.raises(ValueError, match="at most as many queries as keys"):
        ops.sliding_window_attention_with_cache(query, key[:, :, :5], value[:, :, :5], window=3)


def test_float64_is_attended_blockwise():
    inputs = [x.double() for x in tensors()]
    assert ops.sliding_window_attention_backend(*inputs) == "blockwise"
    with pytest.raises(RuntimeError, match="takes float32, bfloat16 and float16, got"):
        ops.sliding_window_attention(*inputs, window=3, backend="native")
    with pytest.raises(ValueError, match="unknown backend 'fast'; expected 'auto', 'blockwise', 'native', 'reference'"):
        ops.sliding_window_attention(*inputs, window=3, backend="fast")


@needs_compiler
def test_float32_on_a_cpu_is_the_programs_also_under_autocast():
    query, key, value = (x.float() for x in tensors())
    assert ops.sliding_window_attention_backend(query, key, value) == "native"
    assert ops.sliding_window_attention_backend(query, key, value.double()) == "blockwise"
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.sliding_window_attention_backend(query, key, value) == "native"
        assert ops.sliding_window_attention(query, key, value, window=3).dtype == torch.float32


@pytest.mark.parametrize("queries", [1, 2])
def test_a_cache_of_unlike_rows_is_refused(queries):
    """A program would read behind the end of the shorter one."""
    query, key, value = torch.randn(2, 2, queries, 8), torch.randn(4, 2, 5, 8), torch.randn(4, 2, 5, 3)
    options = {"window": 4, "key_rows": torch.tensor([3, 0])}
    mask = torch.ones(4, 5, dtype=torch.bool)
    assert ops.sliding_window_attention_with_cache(query, key, value, key_mask=mask, **options).shape[3] == 3
    for wrong in (value[:1], value[:0], torch.tensor(1.0)):
        with pytest.raises(ValueError, match="value of 4 rows"):
            ops.sliding_window_attention_with_cache(query, key, wrong, key_mask=mask, **options)
    for other in (mask[:1], torch.tensor(True)):
        with pytest.raises(ValueError, match="key_mask of 4 rows"):
            ops.sliding_window_attention_with_cache(query, key, value, key_mask=other, **options)
    with pytest.raises(ValueError, match="query and key must be"):
        ops.sliding_window_attention_with_cache(query, torch.tensor(1.0), value, **options)
