"""Polynomial and softmax attention by every backend of a device: beside the plain formula, with masks and a cache."""

from functools import partial

import pytest
import torch
from torch import Tensor

from device import plain
from device.yardstick import (
    DTYPES,
    Device,
    Named,
    assert_as_good_as_plain,
    assert_within,
    moved,
    refusal,
    rounded,
    with_gradients,
)
from polysketch import ops
from polysketch.ops.polynomial.api import POLYNOMIAL_BACKENDS

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
POLYNOMIALS = [(64, True, 4), (64, False, 4), (128, True, 4), (64, True, 2), (64, True, 8), (64, False, 2)]


def inputs(width: int, length: int) -> Named:
    """Query, key and value of fewer heads, in float64."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    scales = {"query": width**-0.25, "key": width**-0.25, "value": 1.0}
    return {name: scale * normal(2, 4 if name == "query" else 2, length, width) for name, scale in scales.items()}


def backends(device: Device, like: Tensor) -> list[str]:
    """Of polynomial attention, or the test is skipped."""
    why_not = lambda name: refusal(lambda: ops.polynomial_attention_backend(like, like, backend=name))  # noqa: E731
    return device.backends(POLYNOMIAL_BACKENDS, why_not) or pytest.skip(f"no backend computes {like.dtype} here")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "causal", "degree"), POLYNOMIALS)
def test_polynomials_err_like_the_plain_formula(width, causal, degree, dtype, device, record_property):
    given = inputs(16, 70) if device.small else inputs(width, 1_501)
    options = {"degree": degree, "offset": 1.0, "causal": causal}
    for backend in backends(device, given["query"].to(device.where, dtype)):
        assert_as_good_as_plain(
            partial(ops.polynomial_attention, **options, backend=backend),
            partial(plain.polynomial_attention, **options),
            given,
            dtype,
            device.where,
            lambda name, value: record_property(f"{backend} {name}", value),  # noqa: B023
        )


def masked(attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The first third of row 0 is padding."""
    mask = torch.ones(2, key.shape[2], dtype=torch.bool, device=key.device)
    mask[0, : key.shape[2] // 3] = False
    return attend(query, key, value, causal=True, key_mask=mask)


def cached(attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The last half of the queries over all keys."""
    return attend(query[:, :, query.shape[2] // 2 :], key, value)


def compare(found, expected, dtype: torch.dtype, device: Device, record) -> None:
    """Output and gradients of what runs on the device, against its definition in float64 on the CPU."""
    given = rounded(inputs(16, 70) if device.small else inputs(64, 2_500), dtype)
    run = lambda attend, tensors: with_gradients(lambda **leaves: {"output": attend(**leaves)}, tensors)  # noqa: E731
    assert_within(run(found, moved(given, device.where, dtype)), run(expected, given), TOLERANCES[dtype], record)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("where", "attend"),
    [(masked, ops.polynomial_attention), (cached, ops.polynomial_attention_with_cache)],
    ids=["mask", "cache"],
)
def test_polynomials_with_a_mask_or_a_cache_agree_with_the_reference(where, attend, dtype, device, record_property):
    for backend in backends(device, torch.ones(1, 1, 1, 1, dtype=dtype, device=device.where)):
        found, expected = (partial(where, partial(attend, backend=name)) for name in (backend, "reference"))
        record = lambda name, value: record_property(f"{backend} {name}", value)  # noqa: B023, E731
        compare(found, expected, dtype, device, record)


SOFTMAX = {
    "causal": (partial(ops.softmax_attention, causal=True), partial(plain.softmax_attention, causal=True)),
    "not causal": (ops.softmax_attention, plain.softmax_attention),
    "mask": (partial(masked, ops.softmax_attention), partial(masked, plain.softmax_attention)),
    "cache": (
        partial(cached, ops.softmax_attention_with_cache),
        partial(cached, partial(plain.softmax_attention, causal=True)),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_attention_is_its_formula(name, dtype, computer, record_property):
    compare(*SOFTMAX[name], dtype, computer, record_property)
