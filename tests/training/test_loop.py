"""The loop: stages follow one another, what is due is written, and any checkpoint leads to the same bits."""

import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polysketch.data import TrainingWindows
from polysketch.training.checkpoint import list_checkpoints
from polysketch.training.loop import Loop, StopRequests, Task
from polysketch.training.options import OnResume, RunOptions, StepOptions
from polysketch.training.reporting import Reporter
from polysketch.training.run_folder import LoopFolder
from polysketch.training.step import Updater
from polysketch.training.tensors import load_weights


class Model(nn.Module):
    """Learns the mean of the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def loss(self, ids: Tensor) -> Tensor:
        return (self.weight - ids.float()).square().mean()


class TwoStages(Task):
    """Three steps, then four with a new optimizer."""

    ends = (3, 7)
    advice = "try less"

    def __init__(self) -> None:
        self.model = Model()
        self.measured: list[tuple[str, int]] = []
        self.enter(0)

    def enter(self, step: int) -> None:
        first = step < 3
        self.stage, self.first_step = ("first", 0) if first else ("second", 3)
        options = StepOptions(steps=3 if first else 4, warmup=0, learning_rate=1.0 if first else 0.1)
        self.updater = Updater(self.model, options, torch.float32)

    def end_step(self, step: int, reporter: Reporter) -> None:
        if step in self.ends:
            self.measured.append((self.stage, step))
            reporter.write({"kind": "evaluation", "step": step, "stage": self.stage})
            if step < 7:
                self.enter(step)

    def tensors(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def load(self, step: int, tensors: Mapping[str, Tensor], source: str) -> None:
        self.enter(step)
        load_weights(self.model, tensors, source)


@pytest.fixture
def make_loop(tmp_path: Path):
    """A function that gives a loop over two stages in a folder, with its task."""

    def make(name: str, **changes) -> tuple[Loop, TwoStages, LoopFolder]:
        folder = LoopFolder(tmp_path / name)
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        sizes = {"context": 4, "batch_size": 2, "log_every": 2, "save_every": 2, "keep": 9}
        options = RunOptions(data=tmp_path, out=folder.path, **sizes | changes)
        task = TwoStages()
        windows = TrainingWindows(np.arange(100), 4, seed=0)
        reporter = Reporter(folder, task.ends[-1], show=False)
        return Loop(folder, options, task, windows, reporter), task, folder

    return make


def lines(folder: LoopFolder) -> list[dict]:
    return Reporter(folder, 7, show=False).metrics.read()


def test_stages_follow_one_another_with_what_is_due_written(make_loop):
    loop, task, folder = make_loop("run")
    loop.save()
    assert loop.run(StopRequests(), math.inf) == "finished"
    assert task.measured == [("first", 3), ("second", 7)]
    found = [(line["kind"], line["step"]) for line in lines(folder)]
    first, second = [("first", 2), ("first", 3), ("evaluation", 3)], [("second", 4), ("second", 6), ("second", 7)]
    assert found == [*first, *second, ("evaluation", 7)]
    saved = [path.name for path in list_checkpoints(folder.checkpoints)]
    assert saved == [f"step-{step:08d}" for step in (0, 2, 3, 4, 6, 7)]


def test_the_schedule_of_a_stage_begins_with_the_stage(make_loop):
    loop, _, folder = make_loop("run", log_every=1)
    loop.run(StopRequests(), math.inf)
    rates = [line["learning_rate"] for line in lines(folder) if line["kind"] != "evaluation"]
    assert rates == pytest.approx([1, 2 / 3, 1 / 3, 0.1, 0.075, 0.05, 0.025])


@pytest.mark.parametrize("step", [0, 2, 3, 4, 6, 7])
def test_it_goes_on_from_every_checkpoint_to_the_same_bits(make_loop, step):
    loop, task, folder = make_loop("run")
    loop.save()
    loop.run(StopRequests(), math.inf)
    resumed, other, _ = make_loop("again")
    resumed.load(folder.checkpoints / f"step-{step:08d}")
    assert resumed.run(StopRequests(), math.inf) == "finished"
    assert torch.equal(other.model.weight, task.model.weight)


def test_after_the_deadline_no_step_is_begun_and_all_is_saved(make_loop):
    loop, _, folder = make_loop("run")
    assert loop.run(StopRequests(), -math.inf) == "time"
    assert [path.name for path in list_checkpoints(folder.checkpoints)] == ["step-00000000"]


def test_a_loss_that_is_not_finite_says_what_to_do_about_it(make_loop):
    loop, task, _ = make_loop("run")
    with torch.no_grad():
        task.model.weight.fill_(math.nan)
    with pytest.raises(RuntimeError, match=r"step 1: expected a finite loss .* is too high: try less"):
        loop.run(StopRequests(), math.inf)


def test_weights_that_are_not_finite_are_not_saved(make_loop):
    """They come of a finite gradient where the rate is huge; earlier checkpoints stay."""
    loop, task, folder = make_loop("run")
    loop.save()
    loop.step += 1
    with torch.no_grad():
        task.model.weight.fill_(math.inf)
    with pytest.raises(RuntimeError, match=r"step 1: expected finite weights, .* safe up to step-00000000.* try less"):
        loop.save()
    assert [path.name for path in list_checkpoints(folder.checkpoints)] == ["step-00000000"]


def test_the_options_of_every_run_are_classified():
    assert all(isinstance(field.metadata["on_resume"], OnResume) for field in RunOptions.__dataclass_fields__.values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_at_once_however_long_a_step_takes(number, capfd):
    with StopRequests() as stop:
        os.kill(os.getpid(), number)
        assert stop.signal_number == number
        assert "stopping after this step, and saving; Ctrl-C" in capfd.readouterr().err
    with StopRequests(answers=False) as stop:
        os.kill(os.getpid(), number)
        assert stop.signal_number == number
        assert capfd.readouterr().err == ""
