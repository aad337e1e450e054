"""Checkpoints that are written while training goes on: copied at their step, awaited where they are needed."""

import dataclasses
import threading

import pytest
import torch

from polysketch.distributed.processes import Processes
from polysketch.storage import disk as operations
from polysketch.training import train
from polysketch.training.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.saving import Saver

LIMIT = 60.0


def checkpoint_of(weight: torch.Tensor, step: int) -> Checkpoint:
    state = {"weight/exp_avg": weight * 2, "weight/step": torch.tensor(float(step))}
    return Checkpoint({"weight": weight}, state, {"cpu": torch.get_rng_state()}, {"step": step})


@pytest.fixture
def held(monkeypatch):
    """An event; no folder is made before it is set."""
    event, make = threading.Event(), operations.make_folder

    def make_folder(path):
        assert event.wait(LIMIT)
        make(path)

    monkeypatch.setattr(operations, "make_folder", make_folder)
    return event


def test_what_changes_after_the_copy_is_not_written(tmp_path, held):
    """Weights, moments and counters are updated in place by the next step."""
    weight = torch.arange(6.0)
    checkpoint = checkpoint_of(weight, 3)
    with Saver(tmp_path, 1, Processes()) as saver:
        saver.begin(checkpoint, before=lambda: None)
        for tensor in (weight, *checkpoint.optimizer.values(), *checkpoint.random.values()):
            tensor.add_(1)
        assert (saver.step, saver.saved_step) == (3, None)
        held.set()
        saver.wait()
        assert saver.saved_step == 3
    found = load_checkpoint(find_checkpoint(tmp_path))
    assert torch.equal(found.model["weight"], torch.arange(6.0))
    assert torch.equal(found.optimizer["weight/exp_avg"], torch.arange(6.0) * 2)
    assert found.optimizer["weight/step"] == 3
    assert torch.equal(found.random["cpu"] + 1, checkpoint.random["cpu"])


def test_steps_are_made_while_a_checkpoint_is_written(make_config, monkeypatch):
    """The checkpoint of step 2 waits for the metrics of step 3; the run ends as one that waits for its checkpoints."""
    config = make_config(steps=4)
    third, append = threading.Event(), MetricsFile.append
    make = operations.make_folder

    def noticed(self, values):
        append(self, values)
        if values["step"] == 3:
            third.set()

    def make_folder(path):
        if "step-00000002" in path.name:
            assert third.wait(LIMIT), "training waits for its checkpoint"
        make(path)

    monkeypatch.setattr(MetricsFile, "append", noticed)
    monkeypatch.setattr(operations, "make_folder", make_folder)
    assert train(config, progress=False).step == 4


def test_one_is_written_at_a_time_in_order(tmp_path):
    weight = torch.zeros(3)
    with Saver(tmp_path, 9, Processes()) as saver:
        for step in range(5):
            saver.begin(checkpoint_of(weight, step), before=lambda: None)
            weight += 1
    for step in range(5):
        assert load_checkpoint(tmp_path / f"step-{step:08d}").model["weight"].tolist() == [step] * 3


def test_its_end_waits_for_what_was_begun(tmp_path, held):
    """So the lock of the folder is held as long as anything is written into it, whatever ended the run."""
    saver = Saver(tmp_path, 1, Processes())
    threading.Timer(0.2, held.set).start()

    def fail_beside_it() -> None:
        with saver:
            saver.begin(checkpoint_of(torch.zeros(1), 1), before=lambda: None)
            raise RuntimeError("failed elsewhere")

    with pytest.raises(RuntimeError, match="failed elsewhere"):
        fail_beside_it()
    assert find_checkpoint(tmp_path).name == "step-00000001"


def test_a_failure_is_known_when_it_happened_and_raised_once(tmp_path):
    def fail() -> None:
        raise OSError("no metrics")

    with Saver(tmp_path, 1, Processes()) as saver:
        saver.begin(checkpoint_of(torch.zeros(1), 1), before=fail)
        saver._await_end()
        assert saver.failed
        with pytest.raises(OSError, match="no metrics"):
            saver.wait()
        assert not saver.failed
        assert saver.saved_step is None
        saver.wait()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_copied_for_a_checkpoint_that_is_there(make_config, monkeypatch):
    """The last step's is written once, and a finished run that is resumed writes none."""
    copied = []
    copy = Checkpoint.copied
    monkeypatch.setattr(Checkpoint, "copied", lambda self: copied.append(self.state["step"]) or copy(self))
    config = make_config(steps=4)
    train(config, progress=False)
    train(dataclasses.replace(config, resume=True), progress=False)
    assert copied == [0, 2, 4]
