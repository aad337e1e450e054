"""The programs of the low-rank sketch, in their shipped configurations, as compiled for devices that are not there."""

import functools

import pytest
import torch

from polysketch.ops.low_rank_sketch import triton
from polysketch.ops.triton.ahead_of_time import Compiled, compiling, complaints

PRODUCTS = {(8, 0): "HMMA", (9, 0): "HGMMA", (10, 0): "UTCHMMA"}
# The others with the full product.
CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]
PROGRAMS = ["low_rank_sketch", "low_rank_sketch_inputs_backward", "low_rank_sketch_factors_backward"]


@functools.cache
def compiled_sketch(
    capability: tuple[int, int],
    head_dim: int,
    features: int,
    degree: int,
    rank: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Compiled]:
    """Every program of a call, forward and backward."""
    x, upstream = (torch.empty(2, 4, 1024, width, device="meta", dtype=dtype) for width in (head_dim, features))
    factors = torch.empty(1, rank, degree, head_dim, features, device="meta", dtype=dtype)
    with compiling(capability) as found:
        triton.forward(x, factors)
        triton.backward(upstream, x, factors)
    return found


def assert_well_made(programs: list[Compiled], capability: tuple[int, int]) -> None:
    assert [one.name for one in programs] == PROGRAMS
    for one in programs:
        assert not complaints(one, capability), (one.name, one.constants)
        assert one.tensor_core > 0, f"{one.name} multiplies no matrices; the compiler may have given up"
        assert one.opcodes["F2F"] == 0, f"{one.name} converts numbers one by one, at a sixteenth of the rate"


@pytest.mark.full  # tests/ptx compiles every program too, and executes it
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nothing_spills_shared_memory_is_enough_and_products_run_on_tensor_cores(capability):
    programs = compiled_sketch(capability, 64, 256, 4)
    assert_well_made(programs, capability)
    assert all(one.opcodes[PRODUCTS[capability]] > 0 for one in programs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("head_dim", "features", "degree", "rank"),
    [
        (128, 256, 4, 1),
        (64, 256, 2, 1),
        (64, 256, 4, 4),
        (128, 512, 2, 2),
        (64, 256, 3, 1),
        (64, 128, 6, 2),
        (128, 256, 8, 1),
        (256, 256, 4, 1),
        (16, 16, 1, 1),
        (80, 48, 3, 1),
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nor_does_anything_spill_with_other_widths_ranks_and_degrees(capability, head_dim, features, degree, rank):
    assert_well_made(compiled_sketch(capability, head_dim, features, degree, rank), capability)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("head_dim", "degree"), [(64, 4), (128, 8), (256, 4)])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_four_byte_operands_fit_into_shared_memory(capability, head_dim, degree, dtype):
    """They may spill: float32 products in full precision run on no tensor cores."""
    for one in compiled_sketch(capability, head_dim, 256, degree, 1, dtype):
        assert all("spills" in complaint for complaint in complaints(one, capability))
