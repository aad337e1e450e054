"""Norm of heads and their random sketch by the programs of a device, beside the formula in PyTorch's operations."""

from functools import partial

import pytest
import torch
from torch import Tensor

from device.yardstick import DTYPES, Device, Named, assert_as_good_as_plain, refusal
from polysketch.ops.head_sketch import head_sketch, head_sketch_backend
from polysketch.ops.head_sketch.api import BACKENDS

# Width of heads, features (0 for the norm alone), maps.
SIZES = [(64, 32, 1), (64, 0, 1), (128, 64, 4), (80, 33, 2), (256, 128, 1), (20, 5, 4)]


def both(matrices: Tensor, backend: str, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Normed heads and features, side by side; tokens stand before heads in memory, as a layer hands them over."""
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    given = matrices.to(x.device, x.dtype) if matrices.numel() else None
    normed, features = head_sketch(x, scale, bias, given, backend=backend)
    return normed if features is None else torch.cat([normed, features], -1)


def inputs(width: int, device: Device) -> Named:
    """Rows of different means and deviations, and weights."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = (2, 4, 21 if device.small else 1_501)
    x = normal(*rows, width) * normal(*rows, 1).exp() + normal(*rows, 1)
    return {"x": x, "scale": 1 + normal(width) / 4, "bias": normal(width)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_backend_errs_like_the_plain_formula(size, dtype, device, record_property):
    width, features, maps = size
    generator = torch.Generator().manual_seed(1)
    matrices = torch.randn(maps, 2, width, features, generator=generator, dtype=torch.float64) * width**-0.5
    # What dtype holds exactly: rounding them is no error of the programs.
    matrices, given = matrices.to(dtype), inputs(width, device)
    like = given["x"].to(device.where, dtype), given["scale"].to(device.where, dtype)
    why_not = lambda name: refusal(lambda: head_sketch_backend(*like, None, name))  # noqa: E731
    for backend in device.backends(dict.fromkeys(BACKENDS), why_not) or pytest.skip(f"no program takes {dtype} here"):
        attend, formula = (partial(both, matrices, name) for name in (backend, "reference"))
        assert_as_good_as_plain(attend, formula, given, dtype, device.where, record_property)
