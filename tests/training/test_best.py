"""The checkpoint of the evaluation with the least loss is kept beside the newest ones."""

import dataclasses
import json
import shutil

import pytest
import torch

from polysketch.training import load_model, train
from polysketch.training.best import BestEvaluation, better
from polysketch.training.checkpoint import (
    BEST,
    checkpoint_step,
    find_checkpoint,
    list_checkpoints,
    load_model_tensors,
    load_state,
)
from polysketch.training.manifest import MANIFEST, describe, manifest_bytes
from polysketch.training.text_goal import TextGoal
from polysketch.training.trainer import TrainingTask

LOSSES = (6.0, 5.0, 3.0, 4.0, float("nan"), 3.0)  # of the evaluations after steps 1 to 6: the best is after step 3


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations after steps 1, 2, ... find the losses that are given."""

    def script(losses=LOSSES):
        measure, evaluate = TextGoal.measure, TrainingTask._evaluate

        def told(self, step, reporter):
            monkeypatch.setattr(TextGoal, "measure", lambda *given: measure(*given) | {"loss": losses[step - 1]})
            evaluate(self, step, reporter)

        monkeypatch.setattr(TrainingTask, "_evaluate", told)

    return script


@pytest.fixture
def options(make_config):
    """A run that saves only at its start and end, but for what is best, and evaluates after every step."""

    def make(**changes):
        return make_config(**{"eval_every": 1, "save_every": 100, "keep": 1, **changes})

    return make


def steps_of(config):
    return [checkpoint_step(path) for path in list_checkpoints(config.out / "checkpoints")]


def best_step(config):
    return checkpoint_step(find_checkpoint(config.out / "checkpoints", BEST))


def test_the_best_checkpoint_stays_and_holds_the_weights_of_its_step(scripted, options, tmp_path):
    scripted()
    config = options()
    ended = train(config, progress=False)
    assert steps_of(config) == [3, 6]
    assert best_step(config) == ended.best_step == 3
    all_kept = options(out=tmp_path / "all", save_every=1, keep=100, keep_best=False)
    train(all_kept, progress=False)
    expected = load_model_tensors(all_kept.out / "checkpoints" / "step-00000003")
    found = load_model(config.out, checkpoint=BEST)[0].state_dict()
    last = load_model(config.out)[0].state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(last[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("speed_of_writing", ["at once", pytest.param("late", marks=pytest.mark.full)], indirect=True)
def test_a_killed_run_that_goes_on_keeps_the_same_best(speed_of_writing, scripted, disk, options):
    scripted()
    config = options()
    train(config, progress=False)
    count = len(disk.log)
    for number in range(5, count, max(1, count // 2)):
        shutil.rmtree(config.out)
        disk.restart()
        disk.fail_at = number
        with pytest.raises(disk.Killed):
            train(config, progress=False)
        disk.restart()
        disk.cut_power()
        train(dataclasses.replace(config, resume=True), progress=False)
        assert (steps_of(config), best_step(config)) == ([3, 6], 3), f"killed before operation {number}"


def test_going_back_before_the_best_looks_for_another(scripted, options):
    scripted((2.0, 6.0, 1.0, 5.0, 5.0, 5.0))
    config = options(save_every=2, keep=100)
    train(config, progress=False)
    assert steps_of(config) == [0, 1, 2, 3, 4, 6]
    shutil.rmtree(config.out / "checkpoints" / "step-00000001")  # as it would be with --keep 1
    train(dataclasses.replace(config, resume=True, checkpoint="step-00000002"), progress=False)
    assert best_step(config) == 3
    train(dataclasses.replace(config, resume=True, checkpoint=BEST), progress=False)
    assert best_step(config) == 3


def test_losses_that_are_measured_otherwise_are_not_compared(scripted, options, capsys):
    scripted((6.0, 2.0, 4.0, 5.0, 5.0, 5.0))
    config = options(steps=2, keep=100)
    train(config, progress=False)
    longer = dataclasses.replace(config, resume=True, extend=True, steps=3)
    assert train(longer, progress=False).best_step == 2
    capsys.readouterr()
    ended = train(dataclasses.replace(longer, steps=6, eval_tokens=config.eval_tokens // 2))
    assert "least loss so far, 2.0000 after step 2, was measured otherwise (eval_tokens " in capsys.readouterr().err
    assert ended.best_step == best_step(config) == 4


def test_a_run_that_goes_on_without_a_best_one_lets_the_old_one_go(scripted, options):
    scripted()
    config = options(steps=3)
    train(config, progress=False)
    ended = train(dataclasses.replace(config, resume=True, extend=True, steps=6, keep_best=False), progress=False)
    assert ended.best_step is None
    assert steps_of(config) == [6]
    with pytest.raises(FileNotFoundError, match="no checkpoint 'best'"):
        find_checkpoint(config.out / "checkpoints", BEST)


def test_a_run_without_evaluations_or_that_keeps_none_has_no_best(options, tmp_path):
    for changes in ({"keep_best": False}, {"eval_every": 0}):
        config = options(out=tmp_path / next(iter(changes)), steps=2, **changes)
        train(config, progress=False)
        assert steps_of(config) == [2]
        with pytest.raises(FileNotFoundError, match=r"no checkpoint 'best' in .*: found step-00000002; .*--eval-every"):
            load_model(config.out, checkpoint=BEST)


def test_a_state_that_names_a_later_step_as_the_best_is_refused(scripted, options):
    scripted()
    config = options()
    train(config, progress=False)
    path = config.out / "checkpoints" / "step-00000006"
    state = load_state(path)
    for forged in (
        {"step": 7, "loss": 1.0},
        {"step": -1, "loss": 1.0},
        {"step": 1},
        {"step": 1, "loss": "1"},
        3,
        {"step": 1, "loss": 1.0, "measured": 3},
    ):
        data = json.dumps({**state, BEST: forged}).encode()
        entries = json.loads((path / MANIFEST).read_bytes())["files"]
        (path / "state.json").write_bytes(data)
        (path / MANIFEST).write_bytes(manifest_bytes({**entries, "state.json": describe(data)}))
        with pytest.raises(ValueError, match="expected the state of step 6"):
            find_checkpoint(config.out / "checkpoints", BEST)


def test_a_loss_that_is_equal_or_no_number_is_not_better():
    best = BestEvaluation(2, 1.0)
    assert better(best, 3, 1.0) is best
    assert better(best, 3, float("nan")) is best
    assert better(best, 3, float("-inf")) is best
    assert better(best, 3, None) is best
    assert better(None, 3, None) is None
    assert better(best, 3, 0.5) == BestEvaluation(3, 0.5)
