"""A sliding window by every backend of a device, beside the plain formula: causal, with a key beside and without."""

from functools import partial

import pytest
import torch
from torch import Tensor

from device.yardstick import DTYPES, Device, Named, assert_as_good_as_plain, refusal
from polysketch import ops
from polysketch.ops.window import BACKENDS

# Width of heads, of values, query heads of a key head, window; what there is besides.
CASES = [
    ((64, 64, 1, 256), "beside"),
    ((64, 64, 1, 256), "alone"),
    ((128, 128, 1, 256), "beside"),
    ((64, 64, 4, 1_000), "masked"),
    ((20, 33, 2, 37), "blocks"),
    ((64, 128, 1, 5_000), "both sides"),
]


def inputs(size: tuple[int, int, int, int], kind: str, device: Device) -> Named:
    """Query, key and value of two key heads and, if asked for, a key beside, in float64."""
    width, value_width, shared, _ = size
    length, generator = 70 if device.small else 1_501, torch.Generator().manual_seed(0)
    shapes = {"query": (2 * shared, length, width), "key": (2, length, width), "value": (2, length, value_width)}
    if kind == "beside":
        shapes |= {"logit": (2 * shared, length), "beside": (2 * shared, length, value_width)}
    return {name: torch.randn(2, *shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def attend(backend: str, window: int, kind: str, query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
    """Tokens stand before heads in memory, as a layer hands them over."""
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    mask = torch.ones(len(key), key.shape[2], dtype=torch.bool, device=key.device)
    mask[0, : key.shape[2] // 5] = mask[0, key.shape[2] // 2 :: 7] = False
    return ops.sliding_window_attention(
        *(query, key, value),
        window=window,
        causal=kind != "both sides",
        block_size=50 if kind == "blocks" else None,
        key_mask=mask if kind == "masked" else None,
        beside=ops.BesideKey(*own) if own else None,
        backend=backend,
    )


def by_name(backend: str, window: int, kind: str, **tensors: Tensor) -> Tensor:
    return attend(backend, window, kind, *tensors.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "kind"), CASES, ids=str)
def test_every_backend_errs_like_the_plain_formula(size, kind, dtype, device, record_property):
    given, window = inputs(size, kind, device), min(size[3], 37) if device.small else size[3]
    like = [given[name].to(device.where, dtype) for name in ("query", "key", "value")]
    why_not = lambda name: refusal(lambda: ops.sliding_window_attention_backend(*like, backend=name))  # noqa: E731
    for backend in device.backends(BACKENDS, why_not) or pytest.skip(f"no backend computes {dtype} here"):
        assert_as_good_as_plain(
            partial(by_name, backend, window, kind),
            partial(by_name, "reference", window, kind),
            given,
            dtype,
            device.where,
            lambda name, value: record_property(f"{backend} {name}", value),  # noqa: B023
        )
