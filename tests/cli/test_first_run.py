"""`polysketch train` without sizes: minutes, said in a line; a size that is given, a run and a task keep theirs."""

import json
from pathlib import Path

import pytest

from polysketch import training
from polysketch.cli import first_run, main
from polysketch.training import TrainingConfig, TrainingResult

DEFAULTS = {name: getattr(TrainingConfig, name) for name in first_run.SIZES}


@pytest.fixture
def trained(monkeypatch, data_folder, tmp_path):
    """Run the command without training anything; what `train` was given, as a function of more flags."""
    configs = []

    def train(config):
        configs.append(config)
        return TrainingResult(config.out, config.steps, "finished")

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr("polysketch.training.requirements.check_requirements", lambda flags: None)  # the text is short

    def command(*more: str) -> TrainingConfig:
        assert main(["train", "--data", str(data_folder), "--out", str(tmp_path / "run"), *more]) == 0
        return configs[-1]

    return command


def sizes_of(config: TrainingConfig) -> dict:
    """Those that say how long a run takes."""
    return {name: getattr(config, name) for name in first_run.SIZES}


def test_a_run_without_sizes_is_a_first_one_and_says_what_a_longer_one_takes(trained, capfd, monkeypatch):
    """At its start in one line, and at its end, by its own time."""
    clock = iter([100.0, 400.0])
    monkeypatch.setattr("polysketch.cli.train.time.monotonic", lambda: next(clock))
    assert sizes_of(trained()) == first_run.SIZES
    opening, ending, longer, pasted = capfd.readouterr().err.splitlines()
    assert opening == (
        "a first run, about five minutes on two cores: 650 steps of 4 rows of 512 tokens; --steps, --context or "
        "--batch-size make it another"
    )
    assert ending.startswith("finished: 650 steps")
    assert longer == "more steps make a better model: --steps 6500 would take about 50:00"
    assert pasted.startswith("next: polysketch evaluate ")


def test_another_model_is_not_promised_to_take_five_minutes(trained, capfd):
    """The steps are the same."""
    assert sizes_of(trained("--preset", "mini")) == first_run.SIZES
    assert "a first run, longer than with --preset tiny: 650 steps" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (["--steps", "30"], {"steps": 30}),
        (["--steps=30"], {"steps": 30}),
        (["--context", "64"], {"context": 64}),
        (["--batch-size", "2"], {"batch_size": 2}),
        (["--batch_size", "2"], {"batch_size": 2}),
        (["--max-minutes", "30"], {}),
    ],
)
def test_a_size_that_is_given_leaves_the_others_at_their_defaults(trained, capfd, flags, changed):
    """As before there was a first run; nothing is said of one."""
    assert sizes_of(trained(*flags)) == DEFAULTS | changed
    assert "a first run" not in capfd.readouterr().err


def options_of(run: Path) -> dict:
    """All options of a run, as its folder has them."""
    return json.loads((run / "config.json").read_text())["training"]


def test_a_run_that_is_gone_on_with_keeps_its_sizes(data_folder, tmp_path, capfd):
    """Those of an older run, whose sizes were the defaults of its time."""
    run, small = (
        str(tmp_path / "run"),
        ["--context", "32", "--layers", "1", "--device", "cpu", "--attention", "softmax"],
    )
    data = ["--data", str(data_folder), "--no-tensorboard", "--threads", "1"]
    assert main(["train", *data, "--out", run, *small, "--steps", "2"]) == 0
    before = options_of(tmp_path / "run")
    capfd.readouterr()
    assert main(["train", *data, "--out", run, "--resume"]) == 0
    assert "first run" not in capfd.readouterr().err
    assert options_of(tmp_path / "run") == before | {"resume": True}


def test_a_task_keeps_the_defaults(monkeypatch, tmp_path):
    """Its rows are the task's own."""
    folder = tmp_path / "reversal"
    assert main(["task", "reversal", "--out", str(folder)]) == 0
    assert first_run.sizes_where_none_are_given(["--data", str(folder), "--out", "run"]) == {}
    assert first_run.sizes_where_none_are_given(["--data", str(tmp_path), "--out", "run"]) == first_run.SIZES
