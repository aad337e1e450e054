"""Aligned chunks of exact polynomials against masked attention written out, and what they refuse."""

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


def chunked(query: Tensor, key: Tensor, value: Tensor, chunk: int, causal: bool, mask: Tensor | None) -> Tensor:
    """The definition, by the full matrix, for degree 4 and an offset of 1."""
    length = key.shape[2]
    real = torch.ones(key.shape[0], length, dtype=torch.bool) if mask is None else mask
    position = torch.arange(length) - (real.cumsum(1) == 0).sum(1, keepdim=True)
    number = position.div(chunk, rounding_mode="floor")
    allowed = (number[:, :, None] == number[:, None, :]) & real[:, None, :] & (position >= 0)[:, :, None]
    allowed = allowed.tril() if causal else allowed
    return weighted(scores(query, key) ** 4, allowed[:, None], value, 1.0)


@pytest.mark.parametrize(
    ("length", "chunk", "causal", "masked"),
    pairs_always(
        {"length": tuple(LENGTHS), "chunk": (1, 16, 64, 300), "causal": (True, False), "masked": (True, False)}
    ),
)
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
    inputs = [x.float() for x in tensors(4096, batch=1, heads=1, key_heads=1)]
    assert_no_matrix_of_all_pairs(lambda: ops.local_attention(*inputs, chunk=8, causal=causal), 4096)


def test_what_does_not_fit_is_refused_in_one_line():
    query, key, value = tensors()
    for wrong, error in ((0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"chunk must be (at least 1|an integer), got {wrong}"):
            ops.local_attention(query, key, value, chunk=wrong)
    with pytest.raises(ValueError, match="as many queries as keys, got 5 queries and 37 keys"):
        ops.local_attention(query[:, :, :5], key, value)
    opened = ops.OpenChunk(key[:, :, :8], value[:, :, :8], torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="needs causal=True"):
        ops.local_attention(query, key, value, chunk=8, opened=opened)


def opened_chunk(**changed: Tensor) -> ops.OpenChunk:
    chunk = ops.OpenChunk(torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 5), torch.tensor([5, 6]))
    return chunk._replace(**changed)


@pytest.mark.parametrize(
    ("error", "changed"),
    [
        (ValueError, {"position": torch.tensor([5])}),
        (ValueError, {"position": torch.zeros(0, dtype=torch.int64)}),
        (ValueError, {"position": torch.tensor([5, -1])}),
        (TypeError, {"position": torch.tensor([5.0, 6.0])}),
        (ValueError, {"key": torch.randn(2, 2, 2, 8)}),
        (ValueError, {"key": torch.randn(2, 2, 4, 7)}),
        (ValueError, {"key": torch.randn(1, 2, 4, 8)}),
        (ValueError, {"value": torch.randn(2, 2, 0, 5)}),
        (ValueError, {"value": torch.randn(2, 1, 4, 5)}),
    ],
)
def test_an_open_chunk_of_another_shape_is_refused(error, changed):
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 5)
    options = {"chunk": 4, "causal": True}
    assert ops.local_attention(query, key, value, opened=opened_chunk(), **options).shape == (2, 4, 6, 5)
    with pytest.raises(error, match="opened"):
        ops.local_attention(query, key, value, opened=opened_chunk(**changed), **options)
    with pytest.raises(ValueError, match="opened"):
        ops.local_attention(query, key, value, opened=opened_chunk(), chunk=2**62, causal=True)
