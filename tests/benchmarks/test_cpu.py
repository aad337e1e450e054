"""The CPU benchmark with tiny sizes: it writes what it measured, and its instruments measure right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.cpu.settings import Figure

from benchmarks import ROOT, __main__
from polysketch.benchmarking import floors
from polysketch.benchmarking.floors import Floor, Shape
from polysketch.benchmarking.timing import Clock, Rates, ratio

PROBE = """
import torch
from polysketch.benchmarking.calls import Call
from polysketch.benchmarking.memory_probe import attention_bytes

def make(shape, device, dtype):
    value = torch.ones(shape.batch, shape.heads, shape.length, shape.head_dim)
    def run():
        scratch = torch.ones(shape.length * 1024)
        return value * scratch.sum()
    return Call(run, [value])

from polysketch.benchmarking.floors import Shape
print(attention_bytes(make, Shape(1, 32768, 2), backward=False)["beyond_bytes"])
"""


def test_every_timed_section_is_written_with_machine_commit_and_plot(tmp_path, capsys):
    out = tmp_path / "cpu.json"
    sections = ["forward", "backward", "training", "decoding", "cumulative-sums", "training-memory", "generation"]
    assert __main__.main(["--quick", "--out", str(out), "--only", *sections]) == 0
    report = json.loads(out.read_text())
    assert list(report["sections"]) == sections
    assert {"device", "cores", "threads", "torch", "commit"} <= set(report["environment"])
    assert report["rates"]["operations"] > 0
    for section in report["sections"].values():
        assert section["figures"]
        assert all(figure["value"] > 0 for figure in section["figures"])
    timed = report["sections"]["forward"]["measurements"]
    every = {"sdpa", "features given", "learned sketch", "random sketch", "exact polynomial"}
    assert {one["series"] for one in timed} == every
    assert all(0 < one["floor_seconds"] < one["seconds"] for one in timed)
    assert out.with_suffix(".png").stat().st_size > 1_000
    assert "GFLOP/s" in capsys.readouterr().out


def test_a_section_that_fails_is_recorded_and_makes_the_exit_status_one(tmp_path, monkeypatch):
    def broken(_):
        raise RuntimeError("deliberately broken")

    monkeypatch.setitem(__main__.SECTIONS, "forward", broken)
    out = tmp_path / "cpu.json"
    assert __main__.main(["--quick", "--out", str(out), "--only", "forward"]) == 1
    assert "deliberately broken" in json.loads(out.read_text())["sections"]["forward"]["error"]


def test_an_unknown_section_is_a_usage_error():
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["--only", "nonsense"])


def test_the_memory_probe_finds_scratch_memory_and_not_the_output():
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True)
    scratch = 32_768 * 1_024 * 4
    assert 0.95 * scratch < int(done.stdout) < 1.1 * scratch


def test_alternating_calls_take_turns_and_ratios_compare_neighbours():
    order = []
    functions = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = Clock(torch.device("cpu")).alternate(functions, repeats=2)
    assert order == ["a", "b"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}
    assert ratio([2.0, 20.0, 6.0], [1.0, 10.0, 2.0]) == 2.0


def test_a_floor_is_the_longer_of_arithmetic_and_memory():
    assert Floor(100, 10).seconds(Rates(10, 10)) == 10
    assert Floor(10, 100).seconds(Rates(10, 10)) == 10


def test_doubling_the_length_doubles_the_linear_floor_and_quadruples_the_exact_one():
    short, long = Shape(1, 2**14), Shape(1, 2**15)
    exact = [floors.exact_attention(shape, backward=False, itemsize=2).operations for shape in (short, long)]
    linear = [floors.polysketch(shape, 32, 256, backward=True, itemsize=2).operations for shape in (short, long)]
    assert exact[1] / exact[0] == pytest.approx(4)
    assert linear[1] / linear[0] == pytest.approx(2, rel=0.02)


def test_within_one_chunk_linear_attention_has_the_floor_of_exact_attention():
    shape = Shape(2, 256)
    linear = floors.linear_attention(shape, 32, 256, backward=False, itemsize=4)
    assert linear.operations == floors.exact_attention(shape, backward=False, itemsize=4).operations


def test_a_figure_says_whether_its_target_is_reached():
    assert Figure("speed", 5.0, at_least=5.0).reached is True
    assert Figure("memory", 1.1, at_most=1.0).reached is False
    assert Figure("time", 1.0).reached is None


def test_the_results_folder_lies_in_the_clone():
    assert ROOT / "benchmarks" / "results" == __main__.RESULTS
    assert Path(ROOT, "pyproject.toml").is_file()
