"""A little long work finds nothing, and the campaign finds what leaks, and what another thread changes."""

import os
import tempfile
import threading

import pytest
import torch

from campaigns import endurance


def test_memory_files_and_threads_stay_as_they_are(tmp_path):
    found = endurance.campaign(60, 1, tmp_path, ["decoding", "calls", "interruptions", "forks"])
    assert found.faults == []
    assert sum(found.outcomes.values()) == 4


@pytest.mark.full
def test_training_too(tmp_path):
    assert endurance.campaign(400, 1, tmp_path, ["training"]).faults == []


LEAKS = {
    "memory grew": lambda held: held.append(torch.ones(10**6)),
    "open files": lambda held: os.open(os.devnull, os.O_RDONLY),
    "temporary files": lambda held: tempfile.mkstemp(),
}


def test_planted_leaks_are_found_each_by_its_name(tmp_path, monkeypatch):
    """In one run: what a call leaves in memory hides neither a file that stays open nor one that stays on the disk."""
    held, calls = [], endurance.calls

    def leaking(count, folder, random_):
        for _ in range(count):
            calls(1, folder, random_)
            for leak in LEAKS.values():
                leak(held)

    monkeypatch.setattr(endurance, "PARTS", {"calls": leaking})
    monkeypatch.setattr(endurance, "_BETWEEN", 0.001)
    monkeypatch.setattr(endurance, "_SECONDS_TO_SETTLE", 0.0)
    found = endurance.campaign(120, 0, tmp_path)
    assert [leak for leak in LEAKS if not any(leak in fault for fault in found.faults)] == [], found


def test_a_thread_that_is_not_given_back_is_found(tmp_path, monkeypatch):
    over = threading.Event()

    def starting(count, folder, random_):
        for _ in range(20):  # threads of other tests may end meanwhile
            threading.Thread(target=over.wait, daemon=True).start()

    monkeypatch.setattr(endurance, "PARTS", {"threads": starting})
    monkeypatch.setattr(endurance, "_SECONDS_TO_SETTLE", 0.0)
    try:
        assert any("more threads" in fault for fault in endurance.campaign(5, 0, tmp_path).faults)
    finally:
        over.set()


def test_another_result_in_a_thread_is_found(tmp_path, monkeypatch):
    result, made = endurance._result, []

    def other(name):
        made.append(name)
        return result(name) + (len(made) > 20)

    monkeypatch.setattr(endurance, "_result", other)
    found = endurance.campaign(30, 0, tmp_path, ["calls"])
    assert any("another result than alone" in fault for fault in found.faults)
