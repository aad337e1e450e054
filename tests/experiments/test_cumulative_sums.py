"""The ablation: both ways of summing are the same, the table says what it says, a wrong way is not timed."""

import json

import pytest
import torch
from experiments.polysketchformer import cumulative_sums
from experiments.polysketchformer.sums import (
    CHUNKS,
    TOKENS,
    CumulativeSumsSettings,
    by_chunks,
    time_cumulative_sums,
    token_by_token,
)
from experiments.study.command import run_command

from polysketch.benchmarking import Workbench
from polysketch.benchmarking.timing import Clock, Rates

SUMS = CumulativeSumsSettings(lengths=(64,), features=32, heads=2)


@pytest.fixture
def bench() -> Workbench:
    """A CPU with made-up rates."""
    return Workbench(clock=Clock(torch.device("cpu")), rates=Rates(1e11, 1e10), repeats=2)


def test_the_command_makes_a_table_a_record_and_a_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("polysketch.benchmarking.workbench._COPIED_BYTES", 2**16)
    out, plot = tmp_path / "record.json", tmp_path / "plot.png"
    flags = ["--size", "smoke", "--device", "cpu", "--repeats", "1", "--out", str(out), "--plot", str(plot)]
    assert run_command("sums", cumulative_sums.run, flags, sizes=cumulative_sums.SIZES) == 0
    found = json.loads(out.read_text())["measurements"]
    lines = capsys.readouterr().out.splitlines()
    assert [one["series"] for one in found] == [TOKENS, CHUNKS]
    for one in found:
        assert any(one["series"] in line and f"{one['ratio']:.2f}" in line for line in lines)
        assert one["floor_seconds"] > 0
    assert found[0]["ratio"] == 1
    assert plot.stat().st_size > 1_000


@pytest.mark.parametrize("length", [1, 63, 65])
def test_sums_token_by_token_are_sums_by_chunks(length):
    torch.manual_seed(0)
    query, key = torch.rand(2, 2, 3, length, 24, dtype=torch.float64)
    value = torch.randn(2, 3, length, 5, dtype=torch.float64)
    expected = by_chunks(query, key, value, backend="reference")
    assert torch.allclose(token_by_token(query, key, value), expected)
    assert torch.allclose(by_chunks(query, key, value, compute_chunk=16), expected)


def test_the_ablation_says_what_all_states_at_once_would_take(bench):
    found = time_cumulative_sums(bench, SUMS)
    assert [one["series"] for one in found] == [TOKENS, CHUNKS]
    assert {one["all_states_bytes"] for one in found} == {64 * 2 * 32 * 64 * 4}


def test_sums_that_disagree_are_not_timed(bench, monkeypatch):
    wrong = lambda *tensors: token_by_token(*tensors) * 1.001  # noqa: E731
    monkeypatch.setattr("experiments.polysketchformer.sums.token_by_token", wrong)
    with pytest.raises(ValueError, match="token by token is wrong and is not timed"):
        time_cumulative_sums(bench, SUMS)
