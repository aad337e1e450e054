"""The studies of time: what a run leaves, that a wrong way is not timed, and what ratios say."""

import json
from pathlib import Path

import pytest
import torch

from attention.covering import first_always
from polysketch import ops
from polysketch.benchmarking import Workbench, hyper_speed
from polysketch.benchmarking.calls import sdpa_of
from polysketch.benchmarking.timing import Clock, Rates
from polysketch.cli import main
from polysketch.studies.catalogue import study_called
from polysketch.studies.study import Verdict
from polysketch.studies.timing import studies
from polysketch.studies.timing.study import at_the_longest, best_in_between, faster_than, ratios_of
from polysketch.studies.timing.sums import TOKENS, SumsSettings, by_chunks, time_sums, token_by_token

SUMS = SumsSettings(lengths=(64,), features=32, heads=2)
ONE_ROW = {
    "training-speed": "polysketch-paper+learned=False",
    "block-size": "sums+compute_chunk=64",
    "block-sums": "chunks",
    "hyper-speed": "bidirectional",
    "kernel-speed": "llops+degree=2+num_features=64",
}


@pytest.fixture
def bench() -> Workbench:
    """A CPU with made-up rates."""
    return Workbench(clock=Clock(torch.device("cpu")), rates=Rates(1e11, 1e10), repeats=2)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where studies keep their things."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polysketch.benchmarking.workbench._COPIED_BYTES", 2**16)
    return tmp_path


@pytest.mark.usefixtures("pixels")
@pytest.mark.parametrize(("name", "row"), first_always([*ONE_ROW.items()], 2, several=True))
def test_a_run_leaves_a_record_a_table_a_plot_and_one_line(name: str, row: str, folder: Path, capsys):
    assert main(["study", name, "--only", row, "--threads", "1"]) == 0
    told, (results,) = capsys.readouterr().out, Path("runs/studies").glob(f"{name}-smoke*/results")
    record = json.loads((results / f"{row}-seed0.json").read_text())
    assert record["provenance"]["threads"] == 1
    assert record["rates"]["operations"] > 0
    own = [one for one in record["measurements"] if one["series"] == row]
    others = [one for one in record["measurements"] if one["series"] != row]
    assert len(own) == len(others) > 0
    for one, other in zip(own, others, strict=True):
        assert (one["length"], one["direction"]) == (64, other["direction"])
        assert other["ratio"] == 1
        assert one["ratio"] == pytest.approx(other["seconds"] / one["seconds"], rel=1e-6) or len(one["all_seconds"]) > 1
    assert f"{study_called(name).claim} Paper: " in told
    assert (results / "times.png").stat().st_size > 1_000


def test_every_row_is_one_that_can_be_asked_for():
    for name in ONE_ROW:
        for row in study_called(name).rows:
            study_called(name).check_row(row)
    with pytest.raises(ValueError, match="has no option 'nope'"):
        study_called("kernel-speed").check_row("llops+nope=2")
    with pytest.raises(ValueError, match="expected rows of causal, bidirectional, found 'sideways'"):
        study_called("hyper-speed").check_row("sideways")


@pytest.mark.parametrize("row", ["causal", "bidirectional"])
def test_hyperattention_is_compared_with_the_same_attention_and_agrees_where_it_is_exact(bench, row, monkeypatch):
    asked = []

    def noted(tensors, *, causal, backward):
        asked.append((causal, backward))
        return {"sdpa": sdpa_of(tensors, causal=causal)}

    monkeypatch.setattr(hyper_speed, "sdpa_programs", noted)
    found = studies.time_hyper(bench, row, studies.HeadSettings(lengths=(64,), heads=1, backward=True), 64)
    assert asked == [(row == "causal", True)]
    assert [one["error"] < 1e-5 for one in found if one["series"] == row] == [True, True]


def test_hyperattention_that_disagrees_with_its_definition_is_not_timed(bench, monkeypatch):
    wrong = lambda query, *others, **options: intact(1.01 * query, *others, **options)  # noqa: E731
    intact = ops.hyper_attention
    monkeypatch.setattr(ops, "hyper_attention", wrong)
    monkeypatch.setattr(Clock, "alternate", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(ValueError, match="hyper, causal, with all keys, is wrong and is not timed"):
        studies.time_hyper(bench, "causal", studies.HeadSettings(lengths=(64,), heads=1), 64)


def test_steps_of_version_1_are_of_four_layers_at_32k(bench, monkeypatch):
    asked = []
    monkeypatch.setattr(studies, "time_training", lambda _, settings: asked.append(settings) or [])
    size = study_called("training-speed").sizes["paper-version-1"]
    studies.time_steps(bench, "polysketch-paper", size, *size.lengths)
    assert [(one.layers, one.contexts, one.batch) for one in asked] == [(4, (32_768,), 32)]
    with pytest.raises(ValueError, match="expected layers of at least 1, found 0"):
        studies.StepSettings(lengths=(64,), layers=0)


@pytest.mark.parametrize("length", [1, 63, 65])
def test_sums_token_by_token_are_sums_by_chunks(length):
    torch.manual_seed(0)
    query, key = torch.rand(2, 2, 3, length, 24, dtype=torch.float64)
    value = torch.randn(2, 3, length, 5, dtype=torch.float64)
    expected = by_chunks(query, key, value, backend="reference")
    assert torch.allclose(token_by_token(query, key, value), expected)
    assert torch.allclose(by_chunks(query, key, value, compute_chunk=16), expected)


def test_the_ablation_says_what_all_states_at_once_would_take(bench):
    found = time_sums(bench, "chunks+compute_chunk=16", SUMS, 64)
    assert [one["series"] for one in found] == [TOKENS, "chunks+compute_chunk=16"]
    assert {one["all_states_bytes"] for one in found} == {64 * 2 * 32 * 64 * 4}


def test_sums_that_disagree_are_not_timed(bench, monkeypatch):
    wrong = lambda *tensors: token_by_token(*tensors) * 1.001  # noqa: E731
    monkeypatch.setattr("polysketch.studies.timing.sums.token_by_token", wrong)
    with pytest.raises(ValueError, match="token by token is wrong and is not timed"):
        time_sums(bench, "chunks", SUMS, 64)


def record(row: str, seed: int, **ratios: float) -> dict:
    own = [
        {"series": row, "direction": "forward", "length": int(length[1:]), "ratio": ratio}
        for length, ratio in ratios.items()
    ]
    return {"row": row, "seed": seed, "measurements": [{"series": "sdpa"}, *own]}


def test_ratios_are_medians_over_seeds_and_the_longest_length_decides():
    found = ratios_of([record("a", seed, n64=2.0, n128=ratio) for seed, ratio in enumerate((0.5, 3.0, 1.5))])
    assert found == {"a": {("forward", 64): 2.0, ("forward", 128): 1.5}}
    assert at_the_longest({"a": 1.4})(found) == Verdict("a 1.50 times at 128", True)
    assert at_the_longest({"a": 1.6})(found).holds is False
    assert at_the_longest({"a": 1.0, "b": 1.0})(found).holds is None


def test_a_row_is_faster_than_another_at_every_length_or_not():
    one, other = record("a", 0, n64=2.0, n128=3.0), record("b", 0, n64=1.0, n128=2.0)
    assert faster_than("a", "b")(ratios_of([one, other])) == Verdict("times as fast as b: 64: 2.00, 128: 1.50", True)
    assert faster_than("a", "b")(ratios_of([one, record("b", 0, n64=1.0, n128=4.0)])).holds is False
    assert faster_than("a", "b")(ratios_of([one])).holds is None


def test_the_best_block_is_neither_the_first_nor_the_last():
    found = [record(f"p+{block}", 0, n64=ratio) for block, ratio in ((1, 1.0), (2, 3.0), (3, 2.0))]
    assert best_in_between("p")(ratios_of(found)) == Verdict("p+2 is fastest at 64, 3.00 times", True)
    assert best_in_between("p")(ratios_of([*found, record("p+4", 0, n64=4.0)])).holds is False
    assert best_in_between("p")(ratios_of(found[:2])).holds is None
