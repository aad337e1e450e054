"""The benchmark of the mean loss runs, and its record has what the page quotes."""

import json

import pytest

from benchmarks import RESULTS, mean_loss


@pytest.mark.full
def test_every_step_is_written_with_its_ratio(tmp_path, monkeypatch):
    monkeypatch.setattr(mean_loss, "_ALONE", {"vocab_size": 11, "hidden_size": 4, "tokens": 9})
    out = tmp_path / "record.json"
    assert mean_loss.main(["--cases", "tiny:16", "--repeats", "1", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["steps"][0]["times_as_fast"] > 0
    assert set(report["errors"]) == set(report["peak_megabytes"]) == {"before", "after"}
    assert all(error < 1e-6 for errors in report["errors"].values() for error in errors.values())


def test_the_record_says_that_steps_are_no_slower_and_take_no_more_memory():
    report = json.loads((RESULTS / "mean-loss-20261124.json").read_text())
    ratios = {f"{step['preset']}:{step['tokens']}": step["times_as_fast"] for step in report["steps"]}
    assert ratios["mini:2048"] > 1.05
    assert report["peak_megabytes"]["after"] < 1.01 * report["peak_megabytes"]["before"]
    assert all(report["errors"]["after"][name] < 1.01 * error for name, error in report["errors"]["before"].items())
