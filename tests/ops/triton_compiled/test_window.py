"""The programs of a sliding window, in their shipped configurations, as compiled for absent devices."""

import pytest
import torch

from polysketch.ops.triton.ahead_of_time import Compiled, compiling, complaints
from polysketch.ops.window.triton import launcher
from polysketch.ops.window.types import Inputs, Plan

# The others with the full product.
CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]
PROGRAMS = ["window_forward", "window_grad_query", "window_grad_key_value"]


def compiled(
    capability: tuple[int, int], width: int, beside: bool, dtype: torch.dtype = torch.bfloat16, block: int = 0
) -> list[Compiled]:
    """Every program of a call, forward and backward, of heads as a layer hands them over."""
    heads = torch.empty(2, 1024, 4, width, device="meta", dtype=dtype).transpose(1, 2)
    more = (torch.empty(2, 4, 1024, device="meta", dtype=dtype), heads) if beside else ()
    inputs, plan = Inputs(heads, heads, heads, None, *more), Plan(255, max(0, block - 1), 0.125, block)
    with compiling(capability) as found:
        launcher.backward(inputs, plan, launcher.forward(inputs, plan), heads)
    return found


def assert_well_made(programs: list[Compiled], capability: tuple[int, int]) -> None:
    assert [one.name for one in programs] == PROGRAMS
    for one in programs:
        assert not complaints(one, capability), (one.name, one.constants)
        assert one.tensor_core > 0, one.name
        assert one.opcodes["F2F"] == 0, f"{one.name} converts numbers one by one, at a sixteenth of the rate"


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nothing_spills_and_products_run_on_tensor_cores(capability):
    assert_well_made(compiled(capability, 64, True), capability)


@pytest.mark.full
@pytest.mark.parametrize(
    ("width", "beside", "block"), [(64, False, 0), (64, True, 64), (128, True, 0), (80, True, 0), (16, False, 0)]
)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nor_does_anything_spill_with_other_widths_and_options(capability, width, beside, block):
    assert_well_made(compiled(capability, width, beside, block=block), capability)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_four_byte_operands_fit_into_shared_memory(capability, width, dtype):
    """They may spill: float32 products in full precision run on no tensor cores."""
    for one in compiled(capability, width, True, dtype):
        assert all("spills" in complaint for complaint in complaints(one, capability))
