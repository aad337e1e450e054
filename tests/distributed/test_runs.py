"""Runs of several processes: checkpoints for any number of them, kills, failures, and what the user is told."""

import dataclasses
import json
import os
import re
import shutil
import signal

import numpy as np
import pytest

from distributed import workers
from distributed.launching import free_port, run_processes
from polysketch.cli import main
from polysketch.training import load_model, train
from polysketch.training.checkpoint import find_checkpoint, load_carried, load_checkpoint
from polysketch.training.metrics_file import MetricsFile

TIMES = ("seconds", "tokens_per_second")


def metrics(folder) -> list[dict]:
    lines = MetricsFile(folder / "metrics.jsonl").read()
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def losses(folder) -> np.ndarray:
    return np.array([line["loss"] for line in metrics(folder)])


def tensors(folder) -> dict:
    checkpoint = load_checkpoint(find_checkpoint(folder / "checkpoints"))
    return {name: tensor.numpy() for name, tensor in {**checkpoint.model, **checkpoint.optimizer}.items()}


def assert_same_tensors(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@pytest.fixture
def run_of_two(data_folder, make_config, tmp_path_factory):
    """The folder of a run of two processes that nobody disturbed, with every checkpoint; made once, and not changed."""
    folder = data_folder.parent / "of-two"
    if not folder.exists():
        run_left_alone(2, make_config(out=folder, keep=9), tmp_path_factory.mktemp("of-two"))
    return folder


def test_a_checkpoint_is_for_any_number_of_processes(run_of_two, make_config, tmp_path):
    """Written by two, read by one and by three, bit for bit; gone on with by one, the run ends as by one throughout."""
    whole, shared = make_config(out=tmp_path / "whole"), make_config()
    shutil.copytree(run_of_two, shared.out)
    shutil.rmtree(shared.out / "checkpoints" / "step-00000006")
    names = {path.name for path in (find_checkpoint(shared.out / "checkpoints")).iterdir()}
    assert {"model-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"} < names
    saved = tensors(shared.out)
    model_of_three = dataclasses.replace(shared, batch_size=3)
    by_three, *_ = run_processes(3, workers.checkpoint_of, shared.out, model_of_three, folder=tmp_path / "three")
    assert_same_tensors(by_three.value[0], saved)
    model, description = load_model(shared.out)
    assert description.step == 4
    assert_same_tensors({name: tensor.numpy() for name, tensor in model.state_dict().items()}, model_of(saved))
    train(whole, progress=False)
    train(dataclasses.replace(shared, resume=True), progress=False)
    assert np.abs(losses(shared.out) / losses(whole.out) - 1).max() < 1e-5


def test_one_process_goes_on_with_a_run_of_two_by_its_folder_alone(run_of_two, make_config, capsys):
    """What the processes shared was their own choice: nobody gave a mesh, and so the run has none to keep."""
    config = make_config()
    shutil.copytree(run_of_two, config.out)
    saved = json.loads((config.out / "config.json").read_text())
    assert (saved["training"]["mesh"], saved["resolved"]["mesh"]) == (None, "replicate=1,shard=2,context=1")
    assert main(["train", "--out", str(config.out), "--resume"]) == 0
    assert "--mesh was replicate=1,shard=2,context=1 and is now None: the result agrees" in capsys.readouterr().err


CARRYING = {
    "carry_state": True,
    "context": 16,
    "attention": "polysketch",
    "attention_options": {"window": 8, "sketch_size": 4, "far_bias": 0.0},
}


@pytest.mark.full
def test_states_of_lanes_are_carried_by_the_processes_that_have_them(make_config, tmp_path):
    """Two processes give the losses of one; one goes on with the states that two saved, and two end bit for bit alike
    whether or not they were stopped."""
    whole, shared = (make_config(out=tmp_path / name, **CARRYING) for name in ("whole", "shared"))
    stopped = make_config(**CARRYING, max_minutes=1e-9)
    run_processes(2, workers.run, shared, folder=tmp_path / "left-alone")
    ended = run_processes(2, workers.run_stopped, stopped, 4, folder=tmp_path / "stopped")
    assert {each.value for each in ended} == {(4, "time")}, ended
    saved = find_checkpoint(stopped.out / "checkpoints")
    assert {f"carried-0000{rank}-of-00002.safetensors" for rank in (1, 2)} < {path.name for path in saved.iterdir()}
    assert {int(name.split("/")[0]) // 4 for name in load_carried(saved)} == {0, 1}  # of both processes
    other = tmp_path / "by-one"
    shutil.copytree(stopped.out, other)
    resumed = dataclasses.replace(stopped, max_minutes=None, resume=True)
    run_processes(2, workers.run, resumed, folder=tmp_path / "again")
    assert metrics(stopped.out) == metrics(shared.out)
    assert_same_tensors(tensors(stopped.out), tensors(shared.out))
    train(dataclasses.replace(resumed, out=other, mesh=None), progress=False)
    train(whole, progress=False)
    for folder in (shared.out, other):
        assert np.abs(losses(folder) / losses(whole.out) - 1).max() < 1e-5


def model_of(saved: dict) -> dict:
    return {name: tensor for name, tensor in saved.items() if "/" not in name}


@pytest.mark.full
def test_a_checkpoint_of_one_is_gone_on_with_by_several(make_config, tmp_path):
    config = make_config(max_minutes=1e-9)
    workers.run_stopped(config, 4)
    many = dataclasses.replace(config, max_minutes=None, resume=True)
    ended = run_processes(4, workers.run, many, folder=tmp_path / "told")
    assert {each.value for each in ended} == {(6, "finished")}
    whole = make_config(out=tmp_path / "whole")
    train(whole, progress=False)
    assert np.abs(losses(config.out) / losses(whole.out) - 1).max() < 1e-5


KILLS = [
    pytest.param(2, 1, "write", 3, id="of two, rank 1 writes the second checkpoint"),
    pytest.param(2, 0, "rename", 5, id="of two, rank 0 commits a checkpoint", marks=pytest.mark.full),
    pytest.param(2, 0, "append", 5, id="of two, rank 0 writes metrics", marks=pytest.mark.full),
    pytest.param(4, 0, "rename", 5, id="of four, rank 0 commits a checkpoint", marks=pytest.mark.full),
    pytest.param(4, 1, "copied", 2, id="of four, rank 1 copies the second checkpoint", marks=pytest.mark.full),
    pytest.param(4, 2, "compute_gradient", 4, id="of four, rank 2 begins a step", marks=pytest.mark.full),
    pytest.param(4, 3, "sync", 4, id="of four, rank 3 syncs its share", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("count", "rank", "place", "number"), KILLS)
def test_killed_and_started_again_it_ends_the_same(count, rank, place, number, run_of_two, make_config, tmp_path):
    config, death = make_config(), tmp_path / "death"
    left_alone = run_of_two
    if count > 2:
        left_alone = run_left_alone(count, make_config(out=tmp_path / "alone"), tmp_path)
    arguments_of_run = (config, rank, place, number, death)
    ended = run_processes(count, workers.run_killed, *arguments_of_run, folder=tmp_path / "killed")
    assert_others_end_and_name(rank, ended, death)
    assert_goes_on_to_the_same_end(count, config, left_alone, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("rank", "seconds"), [(rank, 0.05 + 0.11 * rank) for rank in range(4)])
def test_killed_at_any_moment_it_ends_the_same(rank, seconds, make_config, tmp_path):
    """A step of four processes on two cores takes about 0.1 s; there is a checkpoint every second step."""
    config, death = make_config(steps=12), tmp_path / "death"
    left_alone = run_left_alone(4, make_config(steps=12, out=tmp_path / "alone"), tmp_path)
    ended = run_processes(4, workers.run_killed_by_the_clock, config, rank, seconds, death, folder=tmp_path / "killed")
    assert_others_end_and_name(rank, ended, death)
    assert_goes_on_to_the_same_end(4, config, left_alone, tmp_path)


@pytest.mark.full
def test_a_process_that_says_no_more_ends_the_others(make_config, tmp_path):
    """Its connections stay open, so no collective fails."""
    death = tmp_path / "death"
    ended = run_processes(4, workers.run_frozen, make_config(), 3, 40.0, death, folder=tmp_path / "frozen")
    assert_others_end_and_name(3, ended, death)
    assert "no sign of life for 20 s" in ended[0].told


def run_left_alone(count, config, folder):
    run_processes(count, workers.run, config, folder=folder / "uninterrupted")
    return config.out


def assert_others_end_and_name(rank, ended, death) -> None:
    """Within 30 s, with one message in all."""
    assert ended[rank].status == -signal.SIGKILL
    survivors = [each for number, each in enumerate(ended) if number != rank]
    assert {each.status for each in survivors} == {1}
    assert max(each.time for each in survivors) - float(death.read_text()) < 30
    (told,) = [line for each in survivors for line in each.told.splitlines() if "polysketch:" in line]
    assert f"rank {rank}" in told
    assert "start all processes again by the same command with --resume" in told


def assert_goes_on_to_the_same_end(count, config, left_alone, folder) -> None:
    """Started again, it ends bit for bit as one that was left alone."""
    again = run_processes(count, workers.run, dataclasses.replace(config, resume=True), folder=folder / "again")
    assert {each.value for each in again} == {(config.steps, "finished")}
    assert metrics(config.out) == metrics(left_alone)
    assert_same_tensors(tensors(config.out), tensors(left_alone))


@pytest.mark.full
def test_a_signal_to_one_stops_all_after_the_same_step(make_config, tmp_path):
    config = make_config()
    ended = run_processes(2, workers.run_signalled, config, 1, 3, folder=tmp_path / "told")
    steps = {each.value for each in ended}
    assert len(steps) == 1
    ((step, reason),) = steps
    assert reason == "signal"
    assert find_checkpoint(config.out / "checkpoints").name == f"step-{step:08d}"


def arguments(config, **changes) -> list[str]:
    given = {
        "data": config.data,
        "out": config.out,
        "layers": 1,
        "context": 32,
        "batch-size": 4,
        "steps": 2,
        "save-every": 1,
        "eval-every": 0,
        "device": "cpu",
    }
    flags = given | {name.replace("_", "-"): value for name, value in changes.items()}
    return ["train", "--no-tensorboard", *(str(word) for name, value in flags.items() for word in (f"--{name}", value))]


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.full)], ids=["unlike ranks", "others"])
def test_what_does_not_fit_is_told_in_one_line(others, make_config, data_folder, tmp_path):
    """By the first process alone, with the exit status that one process has; nothing is begun."""
    config = make_config()
    other = tmp_path / "other"
    other.mkdir()
    for path in data_folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    description = json.loads((other / "description.json").read_text())
    (other / "description.json").write_text(json.dumps(description))  # the same text, other bytes
    same = workers.unchanged
    cases = {
        r"--learning-rate 0.002 on rank 0 and 0.1 on rank 1": (same, {1: ["--learning-rate", "0.1"]}, {}),
        "the data's description .* on rank 0 and .* on rank 1": (same, {1: ["--data", str(other)]}, {}),
        "rank 1: expected a prepared folder, found nothing": (same, {1: ["--data", str(tmp_path / "no")]}, {}),
        "the code of the others on rank 0 and of rank 1 on rank 1": (workers.other_code, {}, {}),
    }
    if others:
        cases = {
            "product of 2, the number of processes, found 3": (same, {}, {"mesh": "shard=3"}),
            "under the names replicate, shard, context": (same, {}, {"mesh": "shards=2"}),
            "--batch-size: expected a multiple of 4": (same, {}, {"accumulation": 2, "batch-size": 6}),
            "--optimizer muon: expected one process": (same, {}, {"optimizer": "muon"}),
            "expected a prepared folder, found nothing": (same, {}, {"data": tmp_path / "no"}),
        }
    given = [(free_port(), change, added, arguments(config, **changes)) for change, added, changes in cases.values()]
    first, second = run_processes(2, workers.commands, given, folder=tmp_path / "told")
    for expected, (status, told), (other_status, other_told) in zip(cases, first.value, second.value, strict=True):
        assert status == other_status == 1, told
        assert re.search(expected, told), told
        assert told.startswith("polysketch: ")
        assert told.count("\n") == 1
        assert other_told == ""
    assert not config.out.exists() or os.listdir(config.out) in ([], ["lock"])


@pytest.mark.full
def test_wrong_usage_is_told_by_the_first(tmp_path):
    given = [(free_port(), workers.unchanged, {}, ["train", "--no-such-flag"])]
    first, second = run_processes(2, workers.commands, given, folder=tmp_path / "usage")
    assert first.value[0][0] == second.value[0][0] == 2
    assert "--no-such-flag" in first.value[0][1]
    assert second.value[0][1] == ""


@pytest.mark.full
def test_a_run_folder_that_is_not_shared_is_told(make_config, tmp_path):
    """As on machines without a common file system."""
    added = {1: ["--out", str(tmp_path / "elsewhere")]}
    given = [(free_port(), workers.unchanged, added, arguments(make_config()))]
    first, second = run_processes(2, workers.commands, given, folder=tmp_path / "told")
    assert first.value[0][0] == second.value[0][0] == 1
    assert re.search(r"the run's config.json .* on rank 0 and None on rank 1", first.value[0][1])


@pytest.mark.full
def test_a_full_disk_of_one_is_told_by_the_first(make_config, tmp_path):
    """Before the next checkpoint, all after the same step. The last checkpoint is intact, the run goes on from it."""
    config = make_config()
    words = arguments(config, steps=24, save_every=12, log_every=1)
    full, freed = words, [*words, "--resume"]
    first, second = run_processes(
        2, workers.commands, [(free_port(), workers.full_disk, {}, full)], folder=tmp_path / "full"
    )
    assert 12 <= metrics(config.out)[-1]["step"] < 24
    status, told = first.value[0]
    assert status == second.value[0][0] == 1
    last = told.splitlines()[-1]
    assert last.startswith(
        "polysketch: the checkpoint of step 12 could not be written: rank 1: No space left on device"
    )
    assert "the run is safe up to step-00000000" in last
    assert second.value[0][1] == ""
    first, second = run_processes(
        2, workers.commands, [(free_port(), workers.unchanged, {}, freed)], folder=tmp_path / "freed"
    )
    assert first.value[0][0] == second.value[0][0] == 0
    assert "going on after step 0" in first.value[0][1]
    assert second.value[0][1] == ""
