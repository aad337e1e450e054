"""The middle of a gated linear unit by the programs of a device, beside the formula in PyTorch's operations."""

from functools import partial

import pytest
import torch

from device.yardstick import DTYPES, Device, Named, assert_as_good_as_plain, refusal
from polysketch.ops.gated_gelu import gated_gelu, gated_gelu_backend
from polysketch.ops.gated_gelu.api import BACKENDS


def case(inner: int, rows: int) -> Named:
    """Rows of different sizes."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"joined": normal(2, rows, 2 * inner) * normal(2, rows, 1).exp()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [2048, 1360, 33])
def test_every_backend_errs_like_the_plain_formula(inner, dtype, device: Device, record_property):
    given = case(inner, 3 if device.small else 501)
    like = given["joined"].to(device.where, dtype)
    why_not = lambda name: refusal(lambda: gated_gelu_backend(like, name))  # noqa: E731
    for backend in device.backends(dict.fromkeys(BACKENDS), why_not) or pytest.skip(f"no program takes {dtype} here"):
        gate, formula = (partial(gated_gelu, backend=name) for name in (backend, "reference"))
        assert_as_good_as_plain(gate, formula, given, dtype, device.where, record_property)
