"""The programs of norm and sketch of heads, in their shipped configurations, as compiled for absent devices."""

import pytest
import torch

from polysketch.ops.head_sketch import triton
from polysketch.ops.triton.ahead_of_time import Compiled, compiling, complaints

# The others with the full product.
CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]
PROGRAMS = ["head_sketch", "head_sketch_backward"]


def compiled(
    capability: tuple[int, int], width: int, features: int, dtype: torch.dtype = torch.bfloat16
) -> list[Compiled]:
    """Every program of a call, forward and backward, of heads as a layer hands them over."""
    x = torch.empty(2, 1024, 4, width, device="meta", dtype=dtype).transpose(1, 2)
    weight = torch.empty(width, device="meta", dtype=dtype)
    matrices = torch.empty(1, 2, width, features, device="meta", dtype=dtype) if features else None
    with compiling(capability) as found:
        normed, sketched = triton.forward(x, weight, weight, matrices, 1e-5)
        triton.backward(normed, sketched if features else None, x, weight, weight, matrices, 1e-5)
    return found


def assert_well_made(programs: list[Compiled], capability: tuple[int, int], features: int) -> None:
    assert [one.name for one in programs] == PROGRAMS
    for one in programs:
        assert not complaints(one, capability), (one.name, one.constants)
        assert bool(one.tensor_core) == bool(features), one.name
        assert one.opcodes["F2F"] == 0, f"{one.name} converts numbers one by one, at a sixteenth of the rate"


@pytest.mark.full  # tests/ptx compiles every program too, and executes it
@pytest.mark.parametrize("features", [32, 0])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nothing_spills_and_products_run_on_tensor_cores(capability, features):
    assert_well_made(compiled(capability, 64, features), capability, features)


@pytest.mark.full
@pytest.mark.parametrize(
    ("width", "features"), [(64, 64), (64, 128), (128, 64), (128, 0), (80, 48), (256, 64), (256, 0), (16, 8)]
)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nor_does_anything_spill_with_other_widths_and_features(capability, width, features):
    assert_well_made(compiled(capability, width, features), capability, features)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("width", "features"), [(64, 32), (256, 128), (128, 0)])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_four_byte_operands_fit_into_shared_memory(capability, width, features, dtype):
    """They may spill: float32 products in full precision run on no tensor cores."""
    for one in compiled(capability, width, features, dtype):
        assert all("spills" in complaint for complaint in complaints(one, capability))
