"""A few attacks of each campaign find nothing, and each campaign finds a fault that was planted."""

import json
import random

import pytest

from campaigns import bytes as changed_bytes
from polysketch.storage import sealed
from polysketch.training import metrics_file

_SLOW = ("export", "conversion", "large run")
_PARTS = [pytest.param(one, marks=pytest.mark.full if one in _SLOW else ()) for one in changed_bytes.PARTS]


@pytest.mark.parametrize("part", _PARTS)
def test_changed_bytes_are_found(part, tmp_path):
    found = changed_bytes.campaign(8, 3, tmp_path, [part])
    assert not found.faults
    assert found.outcomes["refused"] > 4


def test_a_count_of_all_bytes_takes_each_once(tmp_path):
    (tmp_path / "one").write_bytes(b"abc")
    (tmp_path / "two").write_bytes(b"de")
    files = [tmp_path / "one", tmp_path / "two"]
    every = changed_bytes.chosen(files, 5, random.Random(0))
    assert every == [(files[0], 0), (files[0], 1), (files[0], 2), (files[1], 0), (files[1], 1)]
    assert len(changed_bytes.chosen(files, 4, random.Random(0))) == 4


def test_the_campaign_of_bytes_finds_a_file_that_nobody_checks(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed, "_digest", lambda values: "0" * 64)
    found = changed_bytes.campaign(120, 0, tmp_path, ["prepared"])
    assert any("description.json" in fault and "used silently" in fault for fault in found.faults)


@pytest.mark.full
def test_the_campaign_of_bytes_finds_metrics_without_sums(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "_sum_of", lambda values: b"00000000")
    found = changed_bytes.campaign(200, 0, tmp_path, ["run"])
    assert any("metrics.jsonl" in fault and "used silently" in fault for fault in found.faults)


@pytest.mark.parametrize("module", [changed_bytes])
def test_the_command_prints_a_record_and_its_status_says_whether_there_are_faults(module, monkeypatch, capsys):
    monkeypatch.setattr(module, "campaign", None)
    for faults in ([], ["one"]):
        argv = ["--count", "7", "--seed", "5"]

        def campaign(count, seed, folder, faults=faults):
            assert (count, seed, list(folder.iterdir())) == (7, 5, [])
            return module.Found(faults=faults)

        assert module.main(campaign, module.__doc__, 1, argv) == bool(faults)
        assert json.loads(capsys.readouterr().out)["faults"] == faults
