"""A little long work finds nothing, and the campaign finds what leaks, and what another thread changes."""

import os
import random
import subprocess
import sys
import tempfile
import threading

import pytest
import torch

from campaigns import endurance


@pytest.mark.full
def test_memory_files_and_threads_stay_as_they_are(tmp_path):
    found = endurance.campaign(60, 1, tmp_path, ["decoding", "calls", "interruptions", "forks"])
    assert found.faults == []
    assert sum(found.outcomes.values()) == 4


@pytest.fixture
def few_names(monkeypatch):
    """Two that are quickly computed and compiled, and of which autocast changes one."""
    monkeypatch.setattr(endurance, "_NAMES", ("hyper", "given features"))


@pytest.mark.full
def test_workers_compiled_calls_and_autocast_find_nothing(tmp_path, few_names):
    torch.compiler.reset()
    endurance._compiled.cache_clear()
    found = endurance.campaign(30, 0, tmp_path, ["workers", "compiled", "autocast"])
    assert found.faults == []
    assert sum(found.outcomes.values()) == 3


@pytest.mark.full
def test_new_interpreters_find_the_same(tmp_path, few_names, monkeypatch):
    monkeypatch.setattr(endurance, "_INTERPRETERS", 2)
    endurance.processes(1, tmp_path, random.Random(0))


@pytest.mark.full
def test_training_too(tmp_path):
    assert endurance.campaign(400, 1, tmp_path, ["training"]).faults == []


LEAKS = {
    "memory grew": lambda held: held.append(torch.ones(10**6)),
    "open files": lambda held: os.open(os.devnull, os.O_RDONLY),
    "temporary files": lambda held: tempfile.mkstemp(),
}


@pytest.mark.full
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


def faults_of(part, tmp_path):
    return " ".join(endurance.campaign(5, 0, tmp_path, [part]).faults)


def test_another_result_in_a_worker_of_a_data_loader_is_found(tmp_path, few_names, monkeypatch):
    result, parent = endurance._result, os.getpid()
    monkeypatch.setattr(endurance, "_result", lambda name: result(name) + (os.getpid() != parent))
    assert "another result in a worker" in faults_of("workers", tmp_path)


@pytest.mark.parametrize(("calls", "words"), [(0, "another result compiled"), (2, "than compiled before")])
def test_another_result_of_a_compiled_call_is_found(calls, words, tmp_path, few_names, monkeypatch):
    result, made = endurance._result, []

    def other(name):
        made.append(name)
        return result(name) + (len(made) > calls)

    monkeypatch.setattr(endurance, "_compiled_result", other)
    assert words in faults_of("compiled", tmp_path)


def test_what_autocast_leaves_behind_is_found(tmp_path, few_names, monkeypatch):
    result, used = endurance._result, []

    def spoiled(name):
        used.append(torch.is_autocast_enabled("cpu"))
        return result(name) + (sum(used) > len(endurance._NAMES) and not used[-1])

    monkeypatch.setattr(endurance, "_result", spoiled)
    assert "another result beside autocast" in faults_of("autocast", tmp_path)


def test_a_part_without_autocast_is_found(tmp_path, few_names, monkeypatch):
    monkeypatch.setattr(endurance, "_NAMES", ("given features",))
    assert "autocast changed nothing" in faults_of("autocast", tmp_path)


def test_another_result_of_a_new_interpreter_is_found(tmp_path, few_names, monkeypatch):
    monkeypatch.setattr(endurance, "_PROGRAM", "print('ready', flush=True); input(); print('other'); {times}, {names}")
    assert "in a new interpreter: 'other'" in faults_of("processes", tmp_path)


def test_a_process_that_is_not_ended_is_found(tmp_path, monkeypatch):
    started = []

    def starting(count, folder, random_):
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

    monkeypatch.setattr(endurance, "PARTS", {"processes": starting})
    monkeypatch.setattr(endurance, "_SECONDS_TO_SETTLE", 0.0)
    try:
        assert "1 more processes" in faults_of("processes", tmp_path)
    finally:
        for process in started:
            process.communicate(b"\n")
