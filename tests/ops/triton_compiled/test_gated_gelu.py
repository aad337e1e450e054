"""The programs of a gated linear unit's middle, in their shipped configurations, as compiled for absent devices."""

import pytest
import torch

from polysketch.ops.gated_gelu import triton
from polysketch.ops.triton.ahead_of_time import Compiled, compiling, complaints

# The others with the full product.
CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]
PROGRAMS = ["gated_gelu", "gated_gelu_backward"]


def compiled(capability: tuple[int, int], inner: int, dtype: torch.dtype = torch.bfloat16) -> list[Compiled]:
    """Both programs, of a projection as a unit hands it over."""
    joined = torch.empty(2, 1_023, 2 * inner, device="meta", dtype=dtype)
    with compiling(capability) as found:
        triton.backward(triton.forward(joined), joined)
    return found


def assert_well_made(programs: list[Compiled], capability: tuple[int, int]) -> None:
    assert [one.name for one in programs] == PROGRAMS
    for one in programs:
        assert not complaints(one, capability), (one.name, one.constants)
        assert one.opcodes["F2F"] == 0, f"{one.name} converts numbers one by one, at a sixteenth of the rate"


@pytest.mark.parametrize("inner", [2048, 1360])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nothing_spills_and_halves_are_read_and_written_in_words_of_sixteen_bytes(capability, inner):
    """A thread has 16 numbers of each half: 2 words."""
    programs = compiled(capability, inner)
    assert_well_made(programs, capability)
    words = {one.name: (one.opcodes["LDG"], one.opcodes["STG"]) for one in programs}
    assert words == {"gated_gelu": (4, 2), "gated_gelu_backward": (6, 4)}


@pytest.mark.full
@pytest.mark.parametrize("inner", [2048, 20, 33])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nor_does_anything_spill_with_other_widths_and_dtypes(capability, dtype, inner):
    assert_well_made(compiled(capability, inner, dtype), capability)
