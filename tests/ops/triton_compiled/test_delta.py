"""The programs of the delta rule as compiled for devices that need not be there, as they are configured."""

from functools import cache

import pytest
import torch
import triton

from polysketch.benchmarking import calls
from polysketch.benchmarking.program_calls import program_calls
from polysketch.benchmarking.timing import matmul_precision
from polysketch.ops.triton.ahead_of_time import Compiled, compile_call, complaints

COMMON = {call.name: call for call in program_calls(("delta",), ("bfloat16",))}
CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.full) for other in ((8, 0), (10, 0)))]


@cache
def compiled_call(name: str, precision: str, capability: tuple[int, int]) -> list[Compiled]:
    """The programs of a call, forward and backward, by products of that precision."""
    call = COMMON[name].build(torch.device("meta"), 1, 4, 1_024)
    with matmul_precision(precision):
        return compile_call(lambda: calls.forward_backward(call)(), capability)


@pytest.mark.full  # tests/ptx compiles every program too, and executes it
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("precision", ["high", pytest.param("highest", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name",
    [
        "delta two factors, m=48, h=65",
        pytest.param("delta two factors, m=48, h=64", marks=pytest.mark.full),
        pytest.param("delta two factors, m=64, h=129", marks=pytest.mark.full),
        pytest.param("delta power 1, m=64, h=64", marks=pytest.mark.full),
    ],
)
def test_nothing_spills_everything_fits_and_products_run_on_tensor_cores(name, precision, capability):
    """Products of float32 as it is, which PyTorch's switch asks for at first, run on no tensor cores."""
    found = compiled_call(name, precision, capability)
    assert {program.name for program in found} == {"delta_inverse", "delta_errors"}
    assert [complaint for program in found for complaint in complaints(program, capability)] == []
    assert all((program.tensor_core > 0) == (precision == "high") for program in found)


@pytest.mark.full
@pytest.mark.xfail(not triton.__version__.startswith("3.6."), reason="Triton 3.7 takes 188 registers: two programs")
def test_many_programs_share_a_multiprocessor():
    """They wait for memory in turns; one alone would wait for itself. An H100 has 65,536 registers, 227 KB shared."""
    found = compiled_call("delta two factors, m=48, h=65", "high", (9, 0))
    errors = next(one for one in found if one.name == "delta_errors")
    threads = 32 * errors.constants["num_warps"]
    assert 65_536 // (threads * errors.registers) >= 3
    assert 3 * errors.shared < 227 * 1_024
