"""Guided fuzzing finds a fault that only guidance reaches, and none in ours; every target reads what it should."""

import importlib.util
import os
import random
import re
from pathlib import Path

import pytest
from campaigns.guided_target import judged, read_again
from campaigns.guided_targets import SEPARATOR, TARGETS, changed, example, make, read_input

from campaigns import guided

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="the extra fuzz is not installed"
)
HERE = Path(__file__).parent
SLOW = {"index of weights", "config.json of a model", "config.json of a converted model", "chat template"}
OF_LM_EVAL = {"questions of one's own", "documents of evaluation tasks", "task of BIG-bench"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return tmp_path_factory.mktemp("targets")


@pytest.fixture
def found_by_name(monkeypatch):
    """Modules of this folder are found by the process that fuzzes, too."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


def raising(error):
    def read():
        raise error

    return read


@pytest.mark.parametrize("error", [ValueError("expected a number in x.json, found none"), OSError("no such file")])
def test_a_refusal_is_no_fault(error):
    outcome, wrong, _ = judged(raising(error))
    assert wrong is None
    assert str(error) in outcome


@pytest.mark.parametrize(
    "error",
    [
        KeyError("name"),
        AttributeError("x"),
        ValueError("list index out of range"),
        SystemExit(3),
        BaseException("panic"),
    ],
)
def test_any_other_end_is_a_fault_with_its_place(error):
    _, wrong, place = judged(raising(error))
    assert wrong
    assert place.startswith(f"{type(error).__name__} at test_guided.py:")


def test_what_reads_well_is_read():
    assert judged(lambda: 7) == ("read", None, "")


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - SLOW - OF_LM_EVAL))
def test_a_target_reads_its_own_whole_files(name, sources):
    """So what is refused is refused for what was changed."""
    folder = make(sources, name)
    content = example(TARGETS[name], folder)
    for _ in range(2):  # reading changes nothing that the next input needs
        assert judged(lambda: read_input(TARGETS[name], folder, content)) == ("read", None, "")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(SLOW | OF_LM_EVAL))
def test_a_slow_target_reads_its_own_whole_files(name, sources):
    test_a_target_reads_its_own_whole_files(name, sources)


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - SLOW - OF_LM_EVAL - {"text"}))  # text may be anything
def test_a_target_without_its_files_refuses(name, sources):
    """What it reads is the input, and nothing that lies beside it."""
    folder = make(sources / "without", name)
    outcome, wrong, _ = judged(lambda: read_input(TARGETS[name], folder, b"\xff{"))
    assert (wrong, outcome != "read") == (None, True)


def test_an_input_of_two_files_is_changed_in_one_of_them():
    target = TARGETS["vocab.json and merges.txt"]
    content = SEPARATOR.join([b'{"a": 0}', b"#version: 0.2\na b\n"])
    made = {changed(target, content, random.Random(seed), lambda part: part + b"x") for seed in range(40)}
    assert len(made) > 4
    for new in made:
        parts = new.split(SEPARATOR)
        assert [part == whole for part, whole in zip(parts, content.split(SEPARATOR), strict=True)].count(False) <= 1


def test_a_file_that_an_input_does_not_have_is_not_there(sources):
    target = TARGETS["vocab.json and merges.txt"]
    folder = make(sources / "missing", "vocab.json and merges.txt")
    outcome, wrong, _ = judged(lambda: read_input(target, folder, example(target, folder).split(SEPARATOR)[0]))
    assert wrong is None
    assert "expected merges.txt beside" in outcome


def test_without_atheris_one_line_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert guided.run([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install 'polysketch[fuzz]'" in said


def test_an_input_that_was_kept_is_read_again(found_by_name, tmp_path, capsys):
    (tmp_path / "kept").write_bytes(b"Aa0A")
    assert read_again("guided_planted:NESTED", tmp_path / "kept") == 1
    assert "KeyError: 'planted'" in capsys.readouterr().out
    (tmp_path / "kept").write_bytes(b"Aa0-")
    assert read_again("guided_planted:NESTED", tmp_path / "kept") == 0
    assert capsys.readouterr().out == "read\n"


@needs_atheris
def test_planted_faults_are_found_and_their_inputs_kept(found_by_name, tmp_path):
    """One that guidance alone reaches; a signal and a hang, after which the next target has its turn."""
    names = [f"guided_planted:{name}" for name in ("CRASHING", "HANGING", "NESTED")]
    found = guided.campaign(15_000, 0, tmp_path / "work", names, tmp_path / "kept")
    crash, hang, nested = found.faults
    assert "deadly signal" in crash
    assert "Timeout" in hang
    assert "KeyError: 'planted'" in nested
    for fault, name in zip(found.faults, names, strict=True):
        command, _, path = fault.rpartition(" ")
        assert command.endswith(f'python -m campaigns.guided_target "{name}"')
        assert Path(path).read_bytes() not in (b"", b"--------")
    assert re.match(rb"[A-J][a-j]\d[A-J]", Path(path).read_bytes())
    first, last = found.figures[names[2]]["branches"]
    assert last >= first + 4


@needs_atheris
def test_hundreds_of_inputs_find_nothing(tmp_path):
    names = ["csv", "metrics.jsonl"]
    found = guided.campaign(400, 0, tmp_path / "work", names, tmp_path / "kept")
    assert found.faults == []
    for name in names:
        assert found.figures[name]["inputs"] >= 400
        assert found.figures[name]["branches"][1] > found.figures[name]["branches"][0] > 0
    assert min(found.outcomes["read"], found.outcomes["refused"]) > 20
