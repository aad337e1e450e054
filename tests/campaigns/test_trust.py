"""A few attacks of each campaign find nothing, and each campaign finds a fault that was planted."""

import json

import pytest

from campaigns import bytes as changed_bytes
from polysketch.storage import sealed


def test_changed_bytes_are_found(tmp_path):
    found = changed_bytes.campaign(40, 3, tmp_path)
    assert not found.faults
    assert found.outcomes["refused"] > 20


def test_the_campaign_of_bytes_finds_a_file_that_nobody_checks(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed, "_digest", lambda values: "")
    monkeypatch.setattr(changed_bytes, "READERS", {"prepared": changed_bytes.read_prepared})
    found = changed_bytes.campaign(120, 0, tmp_path)
    assert any("description.json" in fault and "used silently" in fault for fault in found.faults)


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
