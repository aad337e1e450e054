"""The CPU benchmark with tiny sizes: it writes what it measured, and says what it reached."""

import json
from pathlib import Path

import pytest
from benchmarks.figures import Figure, Found, Target
from benchmarks.scale import FULL, QUICK

from benchmarks import ROOT, __main__, bfloat16_products, first_call, plain_features, threads
from polysketch.benchmarking.timing import Rates


@pytest.fixture
def able(monkeypatch):
    """A machine with what some sections need: products in bfloat16, two cores, ONNX Runtime, and quick processes."""
    monkeypatch.setattr(bfloat16_products, "has_products", lambda: True)
    monkeypatch.setattr(threads, "cores", lambda: 2)
    seconds = {"rate": 1e9, "forward": 2.0, "with_backward": 6.0, "onnx_runtime": 3.0}
    monkeypatch.setattr(plain_features, "once", lambda *_: [{"features": 8, **seconds}])
    monkeypatch.setattr(first_call, "find_compiler", lambda: "c++")
    monkeypatch.setattr(first_call, "shipped_programs", lambda folder: folder)
    monkeypatch.setattr(first_call, "once", lambda *_, **__: {"wall": 0.5, "own": 1.0})


@pytest.mark.alone
def test_every_section_is_written_with_machine_commit_and_plot(tmp_path, capsys, able):
    out = tmp_path / "cpu.json"
    sections = list(FULL.sections)
    assert __main__.main(["--quick", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert list(report["sections"]) == sections
    assert {"device", "cores", "threads", "torch", "commit"} <= set(report["environment"])
    assert report["rates"]["operations"] > 0
    for section in report["sections"].values():
        assert section["figures"]
        # Of tiny sizes a share can be rounded to 0, and break-even lies beyond all lengths.
        may_be_none = ("GB", "%", "tokens")
        assert all(figure["value"] > 0 for figure in section["figures"] if figure["unit"] not in may_be_none)
    assert sum(figure["unit"] == "GB" for figure in report["sections"]["backward"]["figures"]) == 2
    timed = report["sections"]["forward"]["measurements"]
    every = {"sdpa", "features given", "learned sketch", "random sketch", "polynomial"}
    assert {one["series"] for one in timed} == every
    # By the rates of this run, of which a busy machine may tell any: so nothing is said of the seconds.
    operations, bandwidth = (report["rates"][name] for name in ("operations", "bandwidth"))
    assert all(one["floor_seconds"] == max(one["operations"] / operations, one["bytes"] / bandwidth) for one in timed)
    assert all(one["floor_seconds"] > 0 for one in timed)
    assert out.with_suffix(".png").stat().st_size > 1_000
    measured = [one for section in report["sections"].values() for one in section["measurements"]]
    directions = {one["direction"] for one in measured if "direction" in one}
    assert directions >= {"forward+backward", "training step of tiny", "decoding with tiny", "forward in bfloat16"}
    found = [figure["name"] for figure in report["sections"]["mechanisms"]["figures"]]
    assert any(name.startswith("the slowest mechanism") for name in found)
    assert "GFLOP/s" in (printed := capsys.readouterr().out)
    assert f"seconds: forward {report['sections']['forward']['seconds']:.0f}, backward" in printed
    assert report["seconds"] >= sum(section["seconds"] for section in report["sections"].values())


@pytest.mark.full
def test_a_section_that_fails_is_recorded_and_makes_the_exit_status_one(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("deliberately broken")

    monkeypatch.setattr(__main__, "run_section", broken)
    out = tmp_path / "cpu.json"
    assert __main__.main(["--quick", "--out", str(out), "--only", "forward"]) == 1
    assert "deliberately broken" in json.loads(out.read_text())["sections"]["forward"]["error"]


def test_an_unknown_section_is_a_usage_error():
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["--only", "nonsense"])


def test_what_is_missed_and_skipped_is_printed_with_its_reason_and_written(tmp_path, monkeypatch, capsys):
    figures = [Figure(str(value), value, target=Target(at_least=2, why="of the floor")) for value in (1.0, 3.0)]
    monkeypatch.setattr(__main__, "run_section", lambda *_: Found(figures, skipped=["power 1: no ONNX Runtime"]))
    monkeypatch.setattr(__main__, "FULL", QUICK)
    monkeypatch.setattr(__main__, "measure_rates", lambda *_: Rates(1e11, 1e10))
    __main__.main(["--quick", "--out", str(tmp_path / "cpu.json"), "--only", "hyper"])
    section = json.loads((tmp_path / "cpu.json").read_text())["sections"]["hyper"]
    assert [(one["reached"], one["why"]) for one in section["figures"]] == [(False, "of the floor"), (True, None)]
    assert section["skipped"] == ["power 1: no ONNX Runtime"]
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert printed.count("why: of the floor") == 1
    assert "skipped: power 1: no ONNX Runtime" in printed
    assert "targets: 1 reached, 1 MISSED" in printed


def test_sections_that_need_what_is_not_here_are_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(bfloat16_products, "has_products", lambda: False)
    monkeypatch.setattr(threads, "cores", lambda: 1)
    monkeypatch.setattr(plain_features.onnx_linear_attention, "installed", lambda: False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert bfloat16_products.section(None, ()).skipped == [bfloat16_products.WITHOUT]
    assert threads.section(None, ()).skipped == [threads.ONE_CORE]
    assert plain_features.skipped() == [plain_features.WITHOUT_ONNX]
    (reason,) = first_call.section(None, (first_call.FirstCallSettings(),)).skipped
    assert "no C++ compiler" in reason


def test_the_results_folder_lies_in_the_clone():
    assert ROOT / "benchmarks" / "results" == __main__.RESULTS
    assert Path(ROOT, "pyproject.toml").is_file()
