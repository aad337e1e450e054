"""The low-rank sketch by every backend of a device, beside the formula in PyTorch's operations."""

from functools import partial

import pytest
import torch

from device.yardstick import DTYPES, Device, Named, assert_as_good_as_plain, named, refusal
from polysketch.ops.low_rank_sketch import low_rank_sketch, low_rank_sketch_backend
from polysketch.ops.low_rank_sketch.api import BACKENDS

# Width of heads, features, degree, rank, maps.
SIZES = [(64, 256, 4, 1, 1), (128, 256, 2, 2, 4), (64, 48, 3, 1, 2), (80, 33, 6, 1, 1), (128, 64, 8, 1, 1)]


def inputs(width: int, features: int, degree: int, rank: int, maps: int, device: Device) -> Named:
    """x, and factors that keep its size."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if device.small:
        width, features = width // 4, features // 4 + 1
    factors = normal(maps, rank, degree, width, features) * width**-0.5
    return {"x": normal(2, 4, 21 if device.small else 1_501, width), "factors": factors}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_backend_errs_like_the_plain_formula(size, dtype, device, record_property):
    given = inputs(*size, device)
    like = [tensor.to(device.where, dtype) for tensor in given.values()]
    why_not = lambda name: refusal(lambda: low_rank_sketch_backend(*like, name))  # noqa: E731
    formula = partial(low_rank_sketch, backend="reference")
    for backend in device.backends(BACKENDS, why_not) or pytest.skip(f"no backend computes {dtype} here"):
        record = lambda name, value: record_property(f"{backend} {name}", value)  # noqa: B023, E731
        with named(backend):
            attend = partial(low_rank_sketch, backend=backend)
            assert_as_good_as_plain(attend, formula, given, dtype, device.where, record)
