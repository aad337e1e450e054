"""Tuning with a clock that is made up: what wins, what is never taken, and where the winners go."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polysketch.benchmarking import program_calls as program_calls_module
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.program_calls import ProgramCall, most_common_first, program_calls
from polysketch.benchmarking.timing import Clock
from polysketch.benchmarking.tuning import Tuning, candidates, tune, write_entries
from polysketch.cli import main
from polysketch.ops.linear.types import LinearAttentionResult
from polysketch.ops.triton import configurations, launch
from polysketch.ops.triton.configurations import configuration
from polysketch.ops.triton.provenance import provenance
from polysketch.ops.triton.tuned import tuned_file

FORWARD, BACKWARD = "linear_outputs", "linear_fold"
CPU = torch.device("cpu")
FEATURES = 48


class Doubled(torch.autograd.Function):
    """Twice x; each pass asks for the constants of a program, and is wrong, or fails, for some of them."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * factor(FORWARD)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * factor(BACKWARD)


def factor(program: str) -> float:
    use = configuration(program, CPU, features=FEATURES, dtype="bfloat16")
    SEEN[program] = use
    launch(Kernel(), 1, configuration=use)
    if use["num_stages"] == 4:
        return 2.5
    if use["num_stages"] == 1:
        raise RuntimeError("out of resources")
    return 2.0


SEEN: dict[str, dict[str, int]] = {}


class Kernel:
    """In the place of a program; as compiled it spills so many bytes as `SPILLS` says."""

    n_spills = 0

    def __getitem__(self, grid: tuple) -> "Kernel":
        return self

    def __call__(self, **options: int) -> "Kernel":
        self.n_spills = SPILLS.get(options["num_warps"], 0)
        return self


SPILLS: dict[int, int] = {}


def prepare(shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    leaf = torch.ones(shape.batch, shape.heads, shape.length)
    return Call(lambda: Doubled.apply(leaf), [leaf])


class MadeUpClock(Clock):
    """The more stages, the faster; four and one would be the fastest by far."""

    def once(self, function) -> float:
        function()
        seconds = {1: 0.001, 2: 3.0, 3: 2.0, 4: 0.001}
        return sum(seconds[use["num_stages"]] + 0.1 * (use["num_warps"] != 8) for use in SEEN.values())


def tuning(folder, **changes) -> Tuning:
    SEEN.clear()
    file_of = lambda program: folder / f"{program}.json"  # noqa: E731
    return Tuning(MadeUpClock(CPU), "sm_90", file_of, sizes=(1, 2, 3), **changes)


def call(name: str = "made up") -> ProgramCall:
    return ProgramCall(name, "linear", "bfloat16", 4, prepare)


@pytest.fixture(autouse=True)
def in_use(monkeypatch, tmp_path_factory):
    """Two stages and four warps are in use."""
    folder = tmp_path_factory.mktemp("shipped")
    entries = {"sm_90": [{"where": {}, "use": {"TOKENS": 64, "num_warps": 4, "num_stages": 2}}]}
    for program in (FORWARD, BACKWARD):
        (folder / f"{program}.json").write_text(json.dumps(entries))
    monkeypatch.setattr(configurations, "FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    configurations.forget_tuned()
    yield
    configurations.forget_tuned()


def test_what_is_found_is_in_use_at_once():
    tune([call()], replace(tuning(Path()), file_of=tuned_file))
    assert configuration(FORWARD, CPU, features=FEATURES, dtype="bfloat16")["num_stages"] == 3


def test_the_fastest_right_candidate_of_each_pass_is_kept_for_calls_with_the_same_properties(tmp_path):
    found = tune([call()], tuning(tmp_path))
    best = {"TOKENS": 64, "num_warps": 8, "num_stages": 3}
    entry = {"where": {"features": FEATURES, "dtype": "bfloat16"}, "use": best}
    assert found == {program: [{**entry, "found_with": provenance(program, CPU)}] for program in (FORWARD, BACKWARD)}
    for program, entries in found.items():
        assert json.loads((tmp_path / f"{program}.json").read_text()) == {"sm_90": entries}


def test_a_candidate_that_spills_more_than_what_is_in_use_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setitem(SPILLS, 8, 16)
    found = tune([call()], tuning(tmp_path))
    assert [entry["use"] for entry in found[FORWARD]] == [{"TOKENS": 64, "num_warps": 4, "num_stages": 3}]


def test_only_the_programs_asked_for_are_tuned(tmp_path):
    assert list(tune([call()], tuning(tmp_path, programs=(BACKWARD,)))) == [BACKWARD]


def test_a_question_that_was_answered_is_not_asked_again(tmp_path):
    heard: list[str] = []
    tune([call("one"), call("two")], tuning(tmp_path, say=heard.append))
    assert sum(FORWARD in line for line in heard) == 1
    assert "1/2 one" in heard[-2]
    assert "2/2 two" in heard[-1]


def test_nothing_is_written_where_nothing_is_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(MadeUpClock, "once", lambda self, function: (function(), 1.0)[1])
    assert tune([call()], tuning(tmp_path)) == {}
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_the_budget_is_named(tmp_path):
    heard: list[str] = []
    assert tune([call("late")], tuning(tmp_path, deadline=time.monotonic() - 1, say=heard.append)) == {}
    assert heard == ["no time left for 1 of 1 calls, the first of them late"]


def test_an_entry_replaces_that_for_the_same_calls_and_precedes_the_others(tmp_path):
    path = tmp_path / "program.json"
    entries = [{"where": {"features": size}, "use": {"TOKENS": size}} for size in (16, 32)]
    write_entries(path, "sm_90", entries)
    write_entries(path, "sm_80", entries[:1])
    write_entries(path, "sm_90", [{"where": {"features": 32}, "use": {"TOKENS": 128}}])
    assert json.loads(path.read_text()) == {
        "sm_90": [{"where": {"features": 32}, "use": {"TOKENS": 128}}, entries[0]],
        "sm_80": entries[:1],
    }


def test_an_entry_for_another_device_stays(tmp_path):
    path = tmp_path / "program.json"
    entries = [{"where": {}, "use": {"TOKENS": 16}, "found_with": {"device": name}} for name in ("H100", "H200")]
    for entry in entries:
        write_entries(path, "sm_90", [entry])
    assert json.loads(path.read_text()) == {"sm_90": entries[::-1]}


def test_candidates_are_few_and_differ_from_what_is_in_use():
    base = {"QUERIES": 128, "KEYS": 64, "num_warps": 4, "num_stages": 2}
    found = candidates(base)
    assert len(found) < 24
    assert base not in found
    assert len({tuple(one.items()) for one in found}) == len(found)
    assert all(set(one) == set(base) for one in found)
    assert all(one[name] >= 16 for one in found for name in ("QUERIES", "KEYS"))


def test_the_first_calls_tuned_are_the_most_common_of_every_op():
    calls = most_common_first(program_calls(dtypes=("bfloat16",)))
    ops = ["linear", "sketch", "low_rank", "head_sketch", "convolution", "rotated_heads", "gated_gelu"]
    ops += ["cross_entropy", "polynomial", "hyper", "window", "delta", "decoding"]
    assert [one.op for one in calls[: len(ops)]] == ops
    assert calls[0].name == "linear power 2, r=32, h=64, local 256"
    assert len(calls) == len({one.name for one in calls}) == len(program_calls(dtypes=("bfloat16",)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "a GPU, found"),
        (("--device", "cpu"), "a GPU, found"),
        (("--budget-seconds", "0"), "expected --budget-seconds above 0"),
    ],
)
def test_without_a_gpu_tuning_ends_in_one_line(options, reason, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["benchmark", "tune", *options]) in (1, 2)
    printed = capsys.readouterr().err
    assert reason in printed
    assert options[:1] == ("--budget-seconds",) or len(printed.strip().splitlines()) == 1


def test_a_decoding_step_is_timed_on_one_state_and_compared_on_copies(monkeypatch):
    seen = []

    def extend(query, key, value, state, **options):
        seen.append(state)
        state.move_to_(state.position + 1)
        return LinearAttentionResult(value, state, value[..., 0])

    monkeypatch.setattr(program_calls_module.ops, "linear_attention_extend_", extend)
    made = program_calls(("decoding",), ("float32",))[0].build(CPU, 1, 2, 8)
    for function in (made.function, made.function, made.timed, made.timed):
        function()
    compared, timed = seen[:2], seen[2:]
    assert compared[0] is not compared[1]
    assert compared[0].position.tolist() == compared[1].position.tolist()
    assert timed[0] is timed[1]
