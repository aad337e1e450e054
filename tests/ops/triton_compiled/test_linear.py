"""What the compiler makes of linear attention's programs, for devices that need not be there."""

import pytest
import torch

from polysketch.benchmarking import calls
from polysketch.benchmarking.program_calls import program_calls
from polysketch.ops.triton.ahead_of_time import compile_call, complaints

COMMON = {call.name: call for call in program_calls(("linear",), ("bfloat16",))}
PROGRAMS = {"linear_fold", "linear_outputs", "linear_sums_gradient"} | {
    "linear_inner_query_gradient",
    "linear_inner_key_gradient",
}

CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]


@pytest.mark.full  # tests/ptx compiles every program too, and executes it
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "linear power 2, r=32, h=64, local 256",
        pytest.param("linear two factors, m=48, h=64", marks=pytest.mark.full),
        pytest.param("linear two factors, m=48, h=64, decay", marks=pytest.mark.full),
        pytest.param("linear power 2, r=64, h=64, local 256", marks=pytest.mark.full),
        pytest.param("linear power 2, r=32, h=128, local 256", marks=pytest.mark.full),
    ],
)
def test_nothing_spills_everything_fits_and_products_run_on_tensor_cores(name, capability):
    call = COMMON[name].build(torch.device("meta"), 1, 256, 1_024)
    found = compile_call(lambda: calls.forward_backward(call)(), capability)
    assert {program.name for program in found} >= PROGRAMS
    assert [complaint for program in found for complaint in complaints(program, capability)] == []
    assert all(program.tensor_core > 0 for program in found if program.name in PROGRAMS)
