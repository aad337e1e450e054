"""HyperAttention is timed when it is right, in both directions, against the fastest exact attention there is."""

import math
from types import SimpleNamespace

import pytest
import torch

from polysketch import ops
from polysketch.benchmarking import HyperSettings, hyper_calls, hyper_speed, time_hyper, ways
from polysketch.benchmarking.calls import heads, sdpa_of
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.hyper_calls import check_hyper, sampled_options
from polysketch.benchmarking.hyper_speed import time_shape
from polysketch.benchmarking.timing import Clock

SMALL = {"heads": 1, "head_dim": 16, "chunk_size": 8, "sample_size": 8, "min_length": 16}
SHAPE = Shape(1, 64, 1, 16)


def one_time(monkeypatch, seconds: dict[str, float]) -> None:
    """Let calls take that long, without a call."""
    alternate = lambda _, functions, **__: {name: [seconds[name]] for name in functions}  # noqa: E731
    monkeypatch.setattr(Clock, "alternate", alternate)


def test_both_ways_and_both_passes_are_timed_at_every_length(bench):
    found = time_hyper(bench, HyperSettings(**SMALL, lengths=(32, 64), backward=True))
    named = [(one["length"], one["direction"], one["series"]) for one in found]
    passes = ("forward", "forward+backward")
    assert named == [
        (length, f"{sides}, {each}", series)
        for length in (32, 64)
        for sides in ("not causal", "causal")
        for each in passes
        for series in ("sdpa", "hyper")
    ]
    for one in found:
        assert (len(one["all_seconds"]), one["over_budget"], one["peak_bytes"]) == (2, False, None)
        assert one["floor_seconds"] > 0
        assert one["paper_ratio"] == (None if one["series"] == "sdpa" else 5.4 if one["causal"] else 54)
        assert (one["ratio"] == 1) == (one["series"] == "sdpa") == (one["error"] is None)


def test_the_error_is_that_of_the_output_which_is_none_where_every_key_is_met(bench):
    few, all_keys = {"min_length": 16, "chunk_size": 8, "sample_size": 8}, {"min_length": 16, "chunk_size": 64}
    for causal in (False, True):
        shape = Shape(1, 64, 1, 16, causal)
        errors = [time_shape(bench, shape, options, backward=False)[1]["error"] for options in (few, all_keys)]
        assert errors[0] > 0.05
        assert errors[1] < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_in_a_check_with_samples_neither_chunks_nor_samples_have_all_keys(causal):
    """Else a wrong draw, or a wrong sort, would not be seen."""
    for length in (64, 4_096):
        options = sampled_options({}, length)
        assert options["chunk_size"] + options["sample_size"] <= length // 4 <= max(16, options["min_length"])
    assert sampled_options({"min_length": 2}, 64)["min_length"] == 2
    shape, device = Shape(1, 128, 1, 16, causal), torch.device("cpu")
    outputs = []
    for seed in (0, 1):  # of the draws
        torch.manual_seed(0)
        call = hyper_calls.prepare_hyper(shape, device, torch.float32, {**sampled_options({}, 128), "seed": seed})
        outputs.append(call.function())
    assert (outputs[0] - outputs[1]).norm() > 0.1 * outputs[0].norm()


@pytest.mark.parametrize("causal", [False, True])
def test_other_draws_than_those_of_the_definition_are_not_timed(causal, bench, monkeypatch):
    intact = ops.hyper_attention

    def other(*tensors, seed, backend="auto", **options):
        return intact(*tensors, seed=seed + (backend != "plain"), backend=backend, **options)

    monkeypatch.setattr(ops, "hyper_attention", other)
    message = "with samples, is wrong and is not timed: its output is off by .* from plain PyTorch with the same draws"
    with pytest.raises(ValueError, match=message):
        check_hyper(bench, Shape(1, 64, 1, 16, causal), {}, backward=False)


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_not_softmax_where_all_keys_are_met_is_not_timed(backward, bench, monkeypatch):
    """Though plain PyTorch does the same; and gradients are compared where they are timed."""
    intact = ops.hyper_attention

    def other(query, key, value, **options):
        scaled = query + 0.01 * (query.detach() if not backward else query - query.detach())
        return intact(scaled, key, value, **options)

    monkeypatch.setattr(ops, "hyper_attention", other)
    monkeypatch.setattr(Clock, "alternate", lambda *_, **__: pytest.fail("timed"))
    what = "gradient of input 1" if backward else "output"
    with pytest.raises(ValueError, match=f"with all keys, is wrong and is not timed: its {what} is off by 0.0"):
        time_hyper(bench, HyperSettings(**SMALL, lengths=(64,), backward=backward))


def test_an_option_that_does_not_exist_is_refused_with_those_that_do(bench):
    with pytest.raises(ValueError, match=r"'hyper' has no option 'window'.*chunk_size"):
        check_hyper(bench, SHAPE, {"window": 3}, backward=False)


def test_the_fastest_of_the_programs_counts(bench, monkeypatch):
    slow_and_fast = lambda tensors, causal, backward: {  # noqa: E731
        name: sdpa_of(tensors, causal=causal) for name in ("sdpa efficient", "sdpa flash")
    }
    monkeypatch.setattr(hyper_speed, "sdpa_programs", slow_and_fast)
    one_time(monkeypatch, {"sdpa efficient": 6.0, "sdpa flash": 3.0, "hyper": 1.0})
    found = {one["series"]: one for one in time_shape(bench, SHAPE, {}, backward=False)}
    assert {name: one["ratio"] for name, one in found.items()} == {"sdpa efficient": 0.5, "sdpa flash": 1, "hyper": 3}
    assert {one["baseline"] for one in found.values()} == {"sdpa flash"}


def test_programs_that_refuse_a_call_are_left_out_and_a_lack_of_memory_is_told(monkeypatch):
    tensors = heads(SHAPE, torch.device("cpu"), torch.float32)
    assert list(ways.sdpa_programs(tensors, causal=True, backward=True)) == ["sdpa"]
    on_a_gpu = [SimpleNamespace(device=torch.device("cuda"))]

    def refusing(error, names):
        def make(_, *, causal, backend=None):
            def attend():
                if backend is not None and backend.name.split("_")[0] in names:
                    raise error

            return SimpleNamespace(function=attend)

        return make

    monkeypatch.setattr(ways.calls, "forward", lambda call: call.function)
    for names, left in (
        (["CUDNN"], ["sdpa flash", "sdpa efficient"]),
        (["CUDNN", "FLASH", "EFFICIENT"], ["sdpa"]),
    ):
        monkeypatch.setattr(ways.calls, "sdpa_of", refusing(RuntimeError("No available kernel"), names))
        assert list(ways.sdpa_programs(on_a_gpu, causal=True, backward=False)) == left
    monkeypatch.setattr(ways.calls, "sdpa_of", refusing(torch.OutOfMemoryError("full"), ["FLASH"]))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        ways.sdpa_programs(on_a_gpu, causal=True, backward=False)


def test_what_is_over_budget_keeps_its_row_and_hyperattention_goes_on(bench, monkeypatch):
    one_time(monkeypatch, {"sdpa": 5.0, "hyper": 0.1})
    found = time_hyper(bench, HyperSettings(**SMALL, lengths=(32, 64), budget_seconds=1.0))
    left_out = [(one["length"], one["series"], one["ratio"]) for one in found if one["over_budget"]]
    assert left_out == [(64, "sdpa", None)] * 2
    assert [one["ratio"] for one in found if one["series"] == "hyper"] == [50, 50, None, None]
    assert [one["error"] is None for one in found if one["series"] == "hyper"] == [False, False, True, True]


def test_progress_ends_at_all_of_it_and_says_what_is_timed(bench, monkeypatch):
    shown = []

    class Kept(hyper_speed.Progress):
        def update(self, done, note="", **_):
            shown.append((done, note, self.total))
            self.done = done

    monkeypatch.setattr(hyper_speed, "Progress", Kept)
    time_hyper(bench, HyperSettings(**SMALL, lengths=(32, 64)))
    done, _, total = shown[-1]
    assert done == total
    assert [one for one, _, _ in shown] == sorted(one for one, _, _ in shown)
    assert any(note.startswith("causal, forward at 64: hyper 2") for _, note, _ in shown)


def test_memory_is_measured_of_the_calls_that_are_timed(bench, monkeypatch):
    asked = []

    def measured(_, name, shapes, sizes, *, backward):
        asked.append((name, [(shape.length, shape.causal) for shape in shapes], backward))
        return [1_000 * shape.length + 2 * backward + shape.causal for shape in shapes]

    monkeypatch.setattr(hyper_speed.memory, "attention", measured)
    found = time_hyper(bench, HyperSettings(**SMALL, lengths=(32, 64), backward=True, memory=True))
    expected = [1_000 * one["length"] + 2 * one["backward"] + one["causal"] for one in found]
    assert [one["peak_bytes"] for one in found] == expected
    way = "hyper:chunk_size=8,sample_size=8,min_length=16"
    assert (way, [(32, True), (64, True)], False) in asked
    assert len(asked) == 8


def test_sizes_that_are_not_the_mechanisms_are_told_as_floors(bench):
    found = time_shape(bench, SHAPE, {"chunk_size": 8, "sample_size": 8, "min_length": 16}, backward=False)
    exact, ours = (one["operations"] for one in found)
    assert ours < exact
    assert math.isclose(exact, 2 * 64 * 64 * 16)
