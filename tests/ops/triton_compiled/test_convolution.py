"""The programs of causal convolutions, in their shipped configurations, as compiled for absent devices."""

import pytest
import torch

from polysketch.ops.convolution import triton
from polysketch.ops.triton.ahead_of_time import Compiled, compiling, complaints

# The others with the full product.
CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]
PROGRAMS = ["causal_convolution", "causal_convolution_backward"]


def compiled(
    capability: tuple[int, int], width: int, size: int, dtype: torch.dtype = torch.bfloat16, continued: bool = False
) -> list[Compiled]:
    """Every program of a call, forward and backward; `continued` with tokens before these and a mask."""
    x = torch.empty(2, 1, 1024, width, device="meta", dtype=dtype)
    taps = torch.empty(1, size, width, device="meta")
    key_mask = torch.empty(2, 1024, device="meta", dtype=torch.bool) if continued else None
    tail = torch.empty(2, 1, size - 1, width, device="meta", dtype=dtype) if continued else None
    with compiling(capability) as found:
        output = triton.forward(x, taps, key_mask, tail)
        triton.backward(output, x, taps, key_mask, tail)
    return found


def assert_well_made(programs: list[Compiled], capability: tuple[int, int]) -> None:
    assert [one.name for one in programs] == PROGRAMS
    for one in programs:
        assert not complaints(one, capability), (one.name, one.constants)
        assert one.opcodes["F2F"] == 0, f"{one.name} converts numbers one by one, at a sixteenth of the rate"
        assert not one.opcodes["ATOMG"] + one.opcodes["RED"], f"{one.name} adds up in no fixed order"


@pytest.mark.full  # tests/ptx compiles every program too, and executes it
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nothing_spills_and_rows_are_read_in_whole_pieces(capability, continued):
    programs = compiled(capability, 2304, 4, continued=continued)
    assert_well_made(programs, capability)
    for one in programs:
        numbers = one.constants["TOKENS"] * one.constants["BLOCK"] // (32 * one.constants["num_warps"])
        of_rows = one.constants["SIZE"] + (one.name == "causal_convolution_backward")
        # Eight numbers of bfloat16 by an instruction, two for the filters of a tap; mask and tail as often again.
        least = of_rows * numbers // 8 + one.constants["SIZE"] * 2
        assert one.opcodes["LDG"] <= (3 if continued else 1) * least, one.name


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("width", "size"), [(2304, 3), (64, 4), (80, 2), (2305, 4), (16, 1), (96, 8), (256, 31)])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nor_does_anything_spill_with_other_widths_sizes_and_dtypes(capability, width, size, dtype):
    assert_well_made(compiled(capability, width, size, dtype), capability)
