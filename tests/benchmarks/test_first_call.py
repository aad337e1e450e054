"""The record of the first call has medians over its rounds, and is what the page quotes."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import RESULTS, first_call


def test_medians_of_both_ways_are_written(tmp_path, monkeypatch):
    seconds = iter([1.0, 10.0, 3.0, 50.0, 2.0, 20.0])
    monkeypatch.setattr(first_call, "once", lambda python, programs: dict.fromkeys(("wall", "own"), next(seconds)))
    assert first_call.main([sys.executable, "--out", str(tmp_path / "record.json")]) == 0
    medians = json.loads((tmp_path / "record.json").read_text())["medians"]
    assert {way: clocks["wall"] for way, clocks in medians.items()} == {"shipped": 2.0, "compiled": 20.0}


@pytest.mark.full
def test_programs_as_a_wheel_brings_them_spare_the_compiler(tmp_path):
    programs = first_call.shipped_programs(tmp_path)
    seconds = first_call.once(Path(sys.executable), programs, source=first_call.SOURCE)["wall"]
    assert seconds < first_call.once(Path(sys.executable), first_call.NOWHERE, source=first_call.SOURCE)["wall"] / 3


def test_the_record_says_that_a_wheel_spares_the_compiler():
    medians = json.loads((RESULTS / "first-call-20261124.json").read_text())["medians"]
    assert medians["shipped"]["wall"] < 0.01
    assert 22 < medians["compiled"]["own"] - medians["shipped"]["own"] < 24
