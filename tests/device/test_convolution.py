"""Causal convolutions by the programs of a device, beside the formula in PyTorch's operations."""

from functools import partial

import pytest
import torch
from torch import Tensor

from device.yardstick import DTYPES, Device, Named, assert_as_good_as_plain, refusal
from polysketch.ops.convolution import causal_convolution, causal_convolution_backend
from polysketch.ops.convolution.api import BACKENDS

# Heads, heads with filters of their own, channels, taps.
SIZES = [(1, 1, 2304, 4), (4, 1, 64, 3), (4, 4, 80, 2), (2, 2, 33, 11), (1, 1, 200, 1), (1, 1, 96, 24)]


def plain(x: Tensor, weight: Tensor, tail: Tensor | None = None, *, key_mask: Tensor | None) -> Tensor:
    """Every intermediate in the dtype of x."""
    size = weight.shape[2]
    x = x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0.0)
    seen = torch.cat([x.new_zeros(*x.shape[:2], size - 1, x.shape[3]) if tail is None else tail, x], 2)
    parts = [seen[:, :, tap : tap + x.shape[2]] * weight[:, None, :, tap] for tap in range(size)]
    return torch.stack(parts).sum(0)


def by(backend: str, key_mask: Tensor | None, x: Tensor, weight: Tensor, tail: Tensor | None = None) -> Tensor:
    """The op; tokens stand before heads in memory, as a layer hands them over."""
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return causal_convolution(x, weight, key_mask=key_mask, tail=tail, backend=backend)[0]


def inputs(size: tuple[int, int, int, int], continued: bool, device: Device) -> Named:
    """Tokens, filters and, where asked for, tokens before these."""
    heads, filters, width, taps = size
    width = min(width, 100) if device.small else width
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = {
        "x": normal(2, heads, 21 if device.small else 3_001, width),
        "weight": normal(filters, width, taps),
        "tail": normal(2, heads, taps - 1, width),
    }
    return drawn if continued and taps > 1 else {name: drawn[name] for name in ("x", "weight")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_backend_errs_like_the_plain_formula(size, continued, dtype, device, record_property):
    given = inputs(size, continued, device)
    x = given["x"].to(device.where, dtype)
    key_mask = torch.arange(x.shape[2], device=device.where).expand(2, -1) % 7 != 3 if continued else None
    why_not = lambda name: refusal(lambda: causal_convolution_backend(x, x, None, name))  # noqa: E731
    for backend in device.backends(dict.fromkeys(BACKENDS), why_not) or pytest.skip(f"no program takes {dtype} here"):
        attend, formula = partial(by, backend, key_mask), partial(plain, key_mask=key_mask)
        assert_as_good_as_plain(attend, formula, given, dtype, device.where, record_property)
