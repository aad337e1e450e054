"""The programs of norm and rotation of heads, in their shipped configurations, as compiled for absent devices."""

import pytest
import torch

from polysketch.ops.rotated_heads import triton
from polysketch.ops.triton.ahead_of_time import Compiled, compiling, complaints

# The others with the full product.
CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]
PROGRAMS = ["rotated_heads", "rotated_heads_backward"]
LENGTH = 1_023


def compiled(
    capability: tuple[int, int],
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    norms: bool = True,
    rotates: bool = True,
    keep_normed: bool = True,
) -> list[Compiled]:
    """Every program of a call, forward and backward, of heads as a layer hands them over."""
    x = torch.empty(2, LENGTH, 9, width, device="meta", dtype=dtype).transpose(1, 2)[:, :6]
    scale = torch.empty(6 * width, device="meta") if norms else None
    angles = torch.empty(LENGTH, width // 2, device="meta") if rotates else None
    with compiling(capability) as found:
        results = triton.forward(x, scale, angles, angles, 1e-5, keep_normed)
        upstream = (one if one.dim() > 1 else None for one in results)
        triton.backward(*upstream, x if norms else None, scale, angles, angles, 1e-5)
    return found


def assert_well_made(programs: list[Compiled], capability: tuple[int, int]) -> None:
    assert [one.name for one in programs] == PROGRAMS
    for one in programs:
        assert not complaints(one, capability), (one.name, one.constants)
        assert one.opcodes["F2F"] == 0, f"{one.name} converts numbers one by one, at a sixteenth of the rate"


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nothing_spills_and_halves_of_heads_are_read_and_written_in_words_of_sixteen_bytes(capability):
    """A thread has 8 numbers of a half: 1 word of it, 2 of an angle's cosine, of its sine, of the half's factors."""
    programs = compiled(capability, 64)
    assert_well_made(programs, capability)
    words = {one.name: (one.opcodes["LDG"], one.opcodes["STG"]) for one in programs}
    assert words == {"rotated_heads": (2 + 4 + 4, 4), "rotated_heads_backward": (6 + 4 + 4, 2 + 2)}


@pytest.mark.full
@pytest.mark.parametrize("width", [128, 256, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parts", [{"keep_normed": False}, {"rotates": False}, {"norms": False}, {}], ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nor_does_anything_spill_with_other_widths_dtypes_and_parts(capability, parts, dtype, width):
    assert_well_made(compiled(capability, width, dtype, **parts), capability)
