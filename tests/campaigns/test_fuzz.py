"""The campaign of fuzz finds nothing in ours, and finds what is planted; every reader reads what is whole."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from campaigns.isolated import complaint, isolated

from campaigns import command_lines, console, function_calls, fuzz, mutated_files, mutations, readers
from polysketch import ops
from polysketch.cli import verify
from polysketch.studies import listing

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="every attack is a fork")


def faults(count, folder, *parts):
    return fuzz.campaign(count, 3, folder, parts).faults


def test_dozens_of_attacks_find_nothing(tmp_path):
    found = fuzz.campaign(5, 3, tmp_path, ("ops", "attention", "a state", "tables of text", "records of studies"))
    assert found.faults == []
    assert found.outcomes["reader: refused"] > 5
    assert found.outcomes["function: done"] > 2


@pytest.mark.full
def test_a_name_that_a_reader_takes_for_granted_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(listing, "read_summary", lambda path: json.loads(path.read_bytes()))
    assert any("KeyError" in fault for fault in faults(25, tmp_path, "records of studies"))


def test_a_reader_that_hangs_is_found(monkeypatch, tmp_path):
    slow = replace(readers.READERS["a state"], read=lambda folder: time.sleep(9), seconds=1)
    monkeypatch.setitem(readers.READERS, "a state", slow)
    assert faults(1, tmp_path, "a state")[0].endswith(": hangs")


def test_an_error_that_no_caller_expects_is_found(monkeypatch, tmp_path):
    def broken(x):
        return x.shape[7]

    broken.__annotations__ = ops.hadamard_transform.__annotations__
    monkeypatch.setattr(ops, "hadamard_transform", broken)
    monkeypatch.setattr(ops, "__all__", ["hadamard_transform"])
    assert any("IndexError" in fault for fault in faults(1, tmp_path, "ops"))


@pytest.mark.full
def test_a_command_that_deletes_a_file_is_found(monkeypatch, tmp_path):
    def make_place(folder):
        (folder / "run").mkdir()
        (folder / "run" / "metrics.jsonl").write_text("{}\n")

    def broken(flags: verify.VerifyFlags) -> int:
        Path("run/metrics.jsonl").unlink()
        return 0

    monkeypatch.setattr(command_lines, "make_place", make_place)
    monkeypatch.setattr(verify, "run", broken)
    assert any("these files changed: run/metrics.jsonl" in fault for fault in faults(6, tmp_path, "verify"))


def test_a_command_that_breaks_in_a_process_of_its_own_is_found(monkeypatch, tmp_path):
    """What only a late import meets is beyond a fork: here a package that breaks where nobody imported it yet."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "tyro.py").write_text("raise KeyError('planted')\n")
    start = console.start_anew

    def planted(words):
        os.environ["PYTHONPATH"] = str(tmp_path / "packages")
        start(words)

    monkeypatch.setattr(console, "start_anew", planted)
    monkeypatch.setattr(command_lines, "make_place", lambda folder: None)
    monkeypatch.setattr(command_lines, "ANEW", 2)
    found = faults(2, tmp_path, "verify")
    assert len(found) == 1
    assert "KeyError: 'planted'" in found[0]


def test_what_python_says_of_a_mistake_is_no_message(capsys):
    def say(text):
        print(f"polysketch: {text}", file=__import__("sys").stderr)
        return 1

    assert "no more than Python does" in (complaint(isolated(lambda: say("list index out of range"))) or "")
    assert complaint(isolated(lambda: say("expected a number in x.json, found none"))) is None


def test_a_mutation_is_its_seed():
    import random

    content = json.dumps({"sha256": "x", "one": [1, 2, {"three": "four"}]}).encode()
    made = [mutations.mutated(content, "x.json", random.Random(seed)) for seed in [*range(40), *range(40)]]
    assert made[:40] == made[40:]
    assert len(set(made)) > 20


def test_every_flag_of_every_command_has_values():
    for command in command_lines.commands():
        assert all(command_lines.values_of(flag.hint) for flag in command_lines.flags_of_command(command))
    assert len(function_calls.callees()) > 150


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_reader_reads_what_is_whole(tmp_path):
    for name, reader in readers.READERS.items():
        ended = isolated(mutated_files.reading(reader, readers.make(tmp_path, name)), seconds=120)
        assert (ended.status, name) == (0, name), ended.text


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_hundreds_of_attacks_find_nothing(tmp_path):
    assert faults(20, tmp_path, *fuzz.PARTS) == []
