"""Boards get every line of metrics, and never decide over a run."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from polysketch.training import train
from polysketch.training.boards import Boards, Tracker, scalars
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.requirements import check_requirements

LINE = {"kind": "train", "step": 3, "loss": 1.5, "gradient_norm": None, "prefix_shares": {"0": [0.2, 0.4]}}


class Recorded:
    """Stands for wandb or trackio: `init` gives a run with `log` and `finish`, as theirs do."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.begun: list[dict[str, Any]] = []
        self.lines: list[tuple[dict[str, Any], int]] = []
        self.finished = 0
        self._fails_at = fails_at

    def init(self, project, name=None, id=None, config=None, resume=None):
        self.begun.append({"project": project, "name": name, "id": id, "config": config, "resume": resume})
        return self

    def log(self, values, step=None):
        if step == self._fails_at:
            raise ConnectionError("no route\nto host")
        self.lines.append((values, step))

    def finish(self):
        self.finished += 1


def metrics_of(config):
    return MetricsFile(config.out / "metrics.jsonl").read()


@pytest.fixture
def tracker(monkeypatch):
    def pretend(name, **given):
        recorded = Recorded(**given)
        monkeypatch.setattr("polysketch.training.boards.require", lambda module: {name: recorded}[module])
        monkeypatch.setattr("importlib.util.find_spec", lambda module, *rest: module == name)
        return recorded

    return pretend


def test_the_numbers_of_a_line_have_names_and_no_more():
    assert scalars(LINE) == {"train/loss": 1.5, "train/prefix_shares/layer 0": pytest.approx(0.3)}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_metrics_and_options_and_goes_on_with_its_run(tracker, name, make_config):
    recorded = tracker(name)
    config = make_config(steps=4, tracker=name, tracker_project="books", attention="softmax", attention_options={})
    train(config, progress=False)
    expected = [(scalars(line), line["step"]) for line in metrics_of(config)]
    assert recorded.lines == expected
    assert {key.split("/")[0] for values, _ in expected for key in values} == {"train", "evaluation"}
    assert recorded.finished == 1
    (begun,) = recorded.begun
    assert begun["project"] == "books"
    assert begun["resume"] == "allow"
    assert begun["name"].startswith(config.out.name)
    assert begun["config"]["training"]["steps"] == 4
    train(make_config(steps=6, tracker=name, attention="softmax", attention_options={}, resume=True, extend=True))
    again = recorded.begun[1]
    assert (again["id"], again["name"]) == (begun["id"], begun["name"])
    assert [step for _, step in recorded.lines[len(expected) :]] == [5, 6, 6]


def test_runs_of_one_name_are_told_apart(tracker, make_config, tmp_path):
    for name in ("wandb", "trackio"):
        recorded = tracker(name)
        for parent, seed in (("a", 0), ("b", 1)):
            train(make_config(out=tmp_path / name / parent / "run", steps=1, seed=seed, tracker=name), progress=False)
        first, second = recorded.begun
        assert (first["id"], first["name"]) != (second["id"], second["name"])


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(tracker, make_config, capsys):
    recorded = tracker("wandb", fails_at=2)
    config = make_config(steps=4, tracker="wandb")
    assert train(config).stopped_by == "finished"
    assert [step for _, step in recorded.lines] == [1]
    assert recorded.finished == 0
    assert [line["step"] for line in metrics_of(config) if line["kind"] == "train"] == [1, 2, 3, 4]
    told = capsys.readouterr().err
    assert told.count("note: wandb failed, and gets no more metrics of this process: no route to host") == 1


def test_a_failure_at_the_end_is_told_too(capsys):
    class Board:
        name = "trackio"

        def close(self):
            raise OSError("disk full")

    said = []
    Boards(iter([Board()]), said.append).close()
    assert said == ["note: trackio failed, and gets no more metrics of this process: disk full"]


def test_one_that_cannot_begin_ends_the_run_with_its_own_words(tracker, make_config, monkeypatch):
    recorded = tracker("wandb")

    def refuse(**given):
        raise PermissionError("no API key:\n  wandb login")

    monkeypatch.setattr(recorded, "init", refuse)
    with pytest.raises(RuntimeError, match="--tracker wandb: it could not begin: no API key: wandb login"):
        train(make_config(steps=1, tracker="wandb"), progress=False)


def test_a_tracker_that_is_not_installed_is_told_before_anything_is_written(make_config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module, *rest: None)
    config = make_config(tracker="trackio")
    with pytest.raises(ValueError, match=re.escape("--tracker trackio: ") + ".*pip install 'polysketch.trackio.'"):
        check_requirements(config)
    assert not config.out.exists()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_package_has_the_functions_that_are_called(name):
    module: ModuleType = pytest.importorskip(name)
    asked = inspect.signature(Recorded.init).parameters.keys() - {"self"} - ({"id"} if name == "trackio" else set())
    assert asked <= inspect.signature(module.init).parameters.keys()
    log = module.log if name == "trackio" else importlib.import_module("wandb.sdk.wandb_run").Run.log
    assert {"step"} <= inspect.signature(log).parameters.keys()


# wandb starts a service of its own. That it has what is called, and is called right, the tests above hold.
@pytest.mark.parametrize("name", [pytest.param("wandb", marks=pytest.mark.full), "trackio"])
def test_a_run_is_written_by_the_package_itself(name, data_folder, tmp_path):
    """Without a network, in a process of its own: both read the environment as they are imported."""
    pytest.importorskip(name)
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
    sizes = "--preset tiny --layers 1 --context 32 --batch-size 1 --steps 2 --log-every 1 --eval-every 2 --device cpu"
    command = [sys.executable, "-m", "polysketch", "train", "--data", str(data_folder), "--out", str(tmp_path / "run")]
    subprocess.run(
        [*command, *sizes.split(), "--eval-tokens", "64", "--no-tensorboard", "--threads", "1", "--tracker", name],
        env={**os.environ, **offline, "TRACKIO_DIR": str(tmp_path / "trackio")},
        check=True,
        capture_output=True,
    )
    kept = {"wandb": "wandb/offline-run-*/*.wandb", "trackio": "trackio/*"}[name]
    written = b"".join(path.read_bytes() for path in tmp_path.glob(kept) if path.is_file())
    for word in (b"train/loss", b"evaluation/bits_per_byte", b"attention_options"):
        assert word in written


def test_the_tracker_of_a_stranger_is_never_imported():
    with pytest.raises(ImportError, match="pip install"):
        Tracker("no_such_package", project="p", run="r", identity="i" * 64, config={})
