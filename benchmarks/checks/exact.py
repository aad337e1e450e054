"""Polynomial and softmax attention against their formulas in float64 on the CPU."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.checks.base import DTYPES, Check, compare, moved, rounded, with_gradients
from polysketch import ops

_TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
_HEADS, _KEY_HEADS, _WIDTH = 4, 2, 64
_LONGER = (
    "polynomial: degree 4, causal",
    "polynomial: mask",
    "polynomial: mask, by programs",
    "softmax: mask",
    "softmax: cache",
)

Attend = Callable[..., Tensor]


def checks(quick: bool) -> list[Check]:
    """Degrees and masks of polynomial attention, softmax, and both with a cache; every dtype, forward and backward."""
    length, longer = (100, 300) if quick else (500, 2_500)  # the longer one spans several blocks on its device
    short = [_check(name, length, dtype) for name in _pairs() for dtype in DTYPES]
    return [*short, *(_check(name, longer, "float32") for name in _LONGER)]


def _check(name: str, length: int, dtype: str) -> Check:
    errors = partial(_errors, *_pairs()[name], length, DTYPES[dtype])
    return Check(f"{name}, n={length}, {dtype}", errors, _TOLERANCES[dtype])


def _pairs() -> dict[str, tuple[Attend, Attend]]:
    """Name -> what runs on the device, and its definition."""
    pairs: dict[str, tuple[Attend, Attend]] = {}
    for degree in (2, 4, 8):
        for causal in (True, False):
            name = f"polynomial: degree {degree}, {'causal' if causal else 'not causal'}"
            attend = partial(ops.polynomial_attention, degree=degree, causal=causal, key_mask=None)
            pairs[name] = (partial(attend, backend="blockwise"), partial(attend, backend="reference"))
    masked = partial(_masked, partial(ops.polynomial_attention, degree=4, causal=True))
    pairs["polynomial: mask"] = (partial(masked, backend="blockwise"), partial(masked, backend="reference"))
    cached = partial(_cached, partial(ops.polynomial_attention_with_cache, degree=4))
    pairs["polynomial: cache"] = (partial(cached, backend="blockwise"), partial(cached, backend="reference"))
    for name, attend in (("mask", masked), ("cache", cached)):
        pairs[f"polynomial: {name}, by programs"] = (
            partial(_by_programs, attend),
            partial(attend, backend="reference"),
        )
    pairs["softmax: causal"] = (partial(ops.softmax_attention, causal=True), partial(_softmax, causal=True))
    pairs["softmax: not causal"] = (ops.softmax_attention, _softmax)
    pairs["softmax: mask"] = (partial(_masked, partial(ops.softmax_attention, causal=True)), _masked_softmax)
    pairs["softmax: cache"] = (partial(_cached, ops.softmax_attention_with_cache), partial(_cached, _softmax_cached))
    return pairs


def _errors(found: Attend, expected: Attend, length: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    tensors = rounded(_random(length), dtype)
    reference = with_gradients(lambda **leaves: {"output": expected(**leaves)}, tensors)
    return compare(
        with_gradients(lambda **leaves: {"output": found(**leaves)}, moved(tensors, device, dtype)), reference
    )


def _random(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(2, heads, length, width, generator=generator, dtype=torch.float64)

    return {
        "query": normal(_HEADS, _WIDTH) / _WIDTH**0.25,
        "key": normal(_KEY_HEADS, _WIDTH) / _WIDTH**0.25,
        "value": normal(_KEY_HEADS, _WIDTH),
    }


def _mask(key: Tensor) -> Tensor:
    """(2, length): the first third of row 0 is padding."""
    mask = torch.ones(2, key.shape[2], dtype=torch.bool, device=key.device)
    mask[0, : key.shape[2] // 3] = False
    return mask


def _masked(attend: Attend, query: Tensor, key: Tensor, value: Tensor, **options: str) -> Tensor:
    return attend(query, key, value, key_mask=_mask(key), **options)


def _cached(attend: Attend, query: Tensor, key: Tensor, value: Tensor, **options: str) -> Tensor:
    """The last half of the queries over all keys."""
    return attend(query[:, :, query.shape[2] // 2 :], key, value, **options)


def _by_programs(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The triton backend, on no condition; where there are no programs the backend of the device."""
    return attend(query, key, value, backend="triton" if query.device.type == "cuda" else "auto")


def _masked_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _softmax(query, key, value, causal=True, key_mask=_mask(key))


def _softmax_cached(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _softmax(query, key, value, causal=True)


def _softmax(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """The formula, with all weights at once; queries are the last positions; rows without a key give zeros."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = query @ key.mT / query.shape[3] ** 0.5
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
    allowed = (allowed.tril(key.shape[2] - query.shape[2]) if causal else allowed)[None, None]
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None, :]
    weights = scores.masked_fill(~allowed, -1e30).softmax(-1).masked_fill(~allowed, 0.0)
    return weights @ value
