"""The programs of cross-entropy and its gradients, in their shipped configurations, as compiled for absent devices."""

import pytest
import torch

from polysketch.ops.cross_entropy import triton
from polysketch.ops.triton.ahead_of_time import Compiled, compiling, complaints

# The others with the full product.
CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]
ROWS = 1_023


def compiled(
    capability: tuple[int, int], vocabulary: int, dtype: torch.dtype, bias: torch.dtype = torch.float32
) -> list[Compiled]:
    """Both programs of a chunk of logits."""
    logits, targets = torch.empty(ROWS, vocabulary, device="meta"), torch.empty(ROWS, device="meta", dtype=torch.int64)
    with compiling(capability) as found:
        triton.cross_entropy(logits, logits.new_empty(vocabulary, dtype=bias), targets, logits.new_empty(()), dtype)
    return found


def assert_well_made(programs: list[Compiled], capability: tuple[int, int]) -> None:
    assert [one.name for one in programs] == ["cross_entropy", "cross_entropy_gradient"]
    for one in programs:
        assert not complaints(one, capability), (one.name, one.constants)
        assert one.opcodes["F2F"] == 0, f"{one.name} converts numbers one by one, at a sixteenth of the rate"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nothing_spills_and_rows_are_read_and_written_in_words_of_sixteen_bytes(capability, dtype):
    """Of 16 and of 8 columns a thread; beside them go four numbers of a row, and three that are written for it."""
    programs = compiled(capability, 50_272, dtype)
    assert_well_made(programs, capability)
    words = [(one.opcodes["LDG"], one.opcodes["STG"]) for one in programs]
    assert words == [(2 * 4 + 4, 3), (2 * 2 + 4, 8 * dtype.itemsize // 16 + 2)]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_of_rows_that_begin_anywhere_a_thread_has_no_columns_side_by_side(capability):
    """Else each of its loads would touch four times the sectors; and stores would be turned in shared memory."""
    programs = compiled(capability, 50_257, torch.bfloat16)
    assert_well_made(programs, capability)
    assert [(one.opcodes["LDG"], one.opcodes["STG"]) for one in programs] == [(2 * 16 + 4, 3), (2 * 8 + 4, 2 * 8)]
    assert programs[1].shared == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("vocabulary", "bias"),
    [(50_272, torch.bfloat16), (50_257, torch.float32), (256, torch.float32), (2, torch.bfloat16)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_nor_does_anything_spill_with_other_vocabularies_and_dtypes(capability, dtype, vocabulary, bias):
    assert_well_made(compiled(capability, vocabulary, dtype, bias), capability)
