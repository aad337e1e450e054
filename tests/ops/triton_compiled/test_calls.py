"""The calls of the compiled table and of tuning: every op launches programs, and none of them depends on a length."""

import pytest
import torch

from polysketch.benchmarking import calls
from polysketch.benchmarking.program_calls import ProgramCall, program_calls
from polysketch.benchmarking.tuning import program_names, questions_asked
from polysketch.ops.linear.triton.launches import spans_of
from polysketch.ops.triton.ahead_of_time import compile_call, complaints, inside_operators
from polysketch.ops.triton.launch import launching

META = torch.device("meta")
COMMON = [call for call in program_calls(dtypes=("bfloat16",)) if "h=64" in call.name or call.op == "cross_entropy"]
DECODING = next(call for call in COMMON if call.op == "decoding")


def launches(call: ProgramCall, *sizes: int) -> tuple[list, list]:
    """What a call launches, with its constants, and the configurations that it asks for."""
    found: list[tuple] = []

    def note(kernel, programs, arguments, options) -> None:
        found.append((kernel.__name__, str(options)))

    with questions_asked() as questions, launching(note), inside_operators():
        call.passes(call.build(META, *sizes))()
    return found, questions


@pytest.mark.parametrize("chunks", [3, pytest.param(1_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("call", COMMON, ids=lambda call: call.name)
def test_no_constant_and_no_property_depends_on_a_length_or_the_batch(call, chunks):
    """In several spans or in one: which of both does."""
    with spans_of(chunks):
        few, asked = launches(call, 1, 4, 3_000)
        many, asked_again = launches(call, 3, 4, 9_001)
    assert few
    assert set(few) == set(many)
    assert asked == asked_again


def test_every_program_with_a_configuration_is_launched_by_some_call():
    asked = {question.program for call in COMMON for question in launches(call, 1, 4, 3_000)[1]}
    assert asked == set(program_names())


def test_a_call_is_compiled_without_a_device_and_without_spills():
    compiled = compile_call(calls.forward(DECODING.build(META, 2, 4, 3_000)), (9, 0))
    assert compiled
    assert all(one.registers > 0 and not complaints(one, (9, 0)) for one in compiled)
