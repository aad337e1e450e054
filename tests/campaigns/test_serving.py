"""The campaign against a server finds nothing in ours, and finds what is planted."""

import json
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from campaigns import serving

FAULTY = str(Path(__file__).with_name("faulty.py"))


@pytest.mark.full  # tests/serving asks every kind of request
@pytest.mark.timeout(600)
def test_hundreds_of_requests_of_all_kinds_find_nothing(capsys):
    assert serving.main(["--count", "45", "--seed", "7"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["first_faults"] == []
    assert sum(report["kinds"].values()) >= 45
    assert len(report["kinds"]) == 13
    assert {"200", "400", "401", "404", "413"} <= report["statuses"].keys()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "message"),
    [("leak", "memory grew from"), ("slot", "expected the "), ("raises", "the log of the server has: ")],
)
def test_a_planted_fault_is_found(fault, message):
    found = serving.campaign(240, seed=7, users=12, program=(FAULTY, fault))
    assert any(message in each for each in found.faults)
