"""The CPU benchmark with tiny sizes: it writes what it measured, and says what it reached."""

import json
from pathlib import Path

import pytest
from benchmarks.figures import Figure

from benchmarks import ROOT, __main__


@pytest.mark.alone
def test_every_timed_section_is_written_with_machine_commit_and_plot(tmp_path, capsys):
    out = tmp_path / "cpu.json"
    sections = ["forward", "backward", "training", "decoding", "mechanisms", "bfloat16"]
    assert __main__.main(["--quick", "--out", str(out), "--only", *sections]) == 0
    report = json.loads(out.read_text())
    assert list(report["sections"]) == sections
    assert {"device", "cores", "threads", "torch", "commit"} <= set(report["environment"])
    assert report["rates"]["operations"] > 0
    for section in report["sections"].values():
        assert section["figures"]
        assert all(figure["value"] > 0 for figure in section["figures"] if figure["unit"] != "GB")
    assert sum(figure["unit"] == "GB" for figure in report["sections"]["backward"]["figures"]) == 2
    timed = report["sections"]["forward"]["measurements"]
    every = {"sdpa", "features given", "learned sketch", "random sketch", "polynomial"}
    assert {one["series"] for one in timed} == every
    # The rates of a floor are measured at another moment, and a busy machine can be slower then.
    assert all(0 < one["floor_seconds"] < 2 * one["seconds"] for one in timed)
    assert out.with_suffix(".png").stat().st_size > 1_000
    measured = [one for section in report["sections"].values() for one in section["measurements"]]
    directions = {one["direction"] for one in measured if "direction" in one}
    assert directions >= {"forward+backward", "training step of tiny", "decoding with tiny", "forward in bfloat16"}
    found = [figure["name"] for figure in report["sections"]["mechanisms"]["figures"]]
    assert any(name.startswith("the slowest mechanism") for name in found)
    assert "GFLOP/s" in capsys.readouterr().out


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


def test_a_figure_says_whether_its_target_is_reached():
    assert Figure("speed", 5.0, at_least=5.0).reached is True
    assert Figure("memory", 1.1, at_most=1.0).reached is False
    assert Figure("time", 1.0).reached is None


def test_the_results_folder_lies_in_the_clone():
    assert ROOT / "benchmarks" / "results" == __main__.RESULTS
    assert Path(ROOT, "pyproject.toml").is_file()
