"""Training itself: it learns, stops when asked, and refuses what cannot work."""

import dataclasses
import errno
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch

from attention.covering import first_always
from polysketch import progress
from polysketch.data import PreparedData
from polysketch.models import TransformerLM
from polysketch.storage import FolderLock
from polysketch.training import load_model, reporting, train
from polysketch.training.checkpoint import list_checkpoints, load_checkpoint, load_model_tensors
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.run_folder import RunFolder
from polysketch.training.start import make_plan
from polysketch.training.step import Updater
from polysketch.training.trainer import build_model


def metrics_of(config):
    return MetricsFile(config.out / "metrics.jsonl").read()


def frequencies_loss(config) -> float:
    """The least loss (nats per token) on the evaluated tokens of a model that knows frequencies and nothing else.

    No fixed distribution has a smaller mean loss on a text than the entropy of the text's own frequencies.
    """
    predicted = PreparedData.open(config.data).split("validation").tokens[1 : config.eval_tokens + 1]
    _, counts = np.unique(predicted, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def test_a_model_learns_more_than_frequencies_and_the_run_folder_is_complete(make_config, plotting):
    """One nat more, by what stands before a token."""
    config = make_config(steps=40, log_every=5, eval_every=20, eval_tokens=1000, save_every=20)
    result = train(config, progress=False)
    assert (result.step, result.stopped_by, result.signal_number) == (40, "finished", None)
    lines = [line for line in metrics_of(config) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(5, 41, 5))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1.0
    assert 0.99 < lines[-1]["tokens"] / (40 * 2 * 64) <= 1  # the rest is padding
    evaluations = [line for line in metrics_of(config) if line["kind"] == "evaluation"]
    assert [line["step"] for line in evaluations] == [20, 40]
    assert evaluations[-1]["loss"] < frequencies_loss(config) - 1.0
    assert evaluations[-1]["bits_per_byte"] > 0
    assert (config.out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {"training", "model", "data", "environment"} <= RunFolder(config.out).read_config().keys()
    assert [path.name for path in list_checkpoints(config.out / "checkpoints")] == ["step-00000020", "step-00000040"]


def test_a_model_that_does_not_look_at_its_input_learns_frequencies_alone(make_config, monkeypatch):
    """Its loss falls by more than a nat all the same, so a fall alone proves nothing."""
    hidden_states = TransformerLM.hidden_states
    extend_hidden = TransformerLM.extend_hidden
    monkeypatch.setattr(
        TransformerLM, "hidden_states", lambda self, ids, **given: hidden_states(self, ids * 0, **given)
    )
    monkeypatch.setattr(TransformerLM, "extend_hidden", lambda self, ids, state: extend_hidden(self, ids * 0, state))
    config = make_config(steps=40, eval_every=40, eval_tokens=1000)
    train(config, progress=False)
    first, last = metrics_of(config)[0]["loss"], metrics_of(config)[-1]["loss"]
    assert frequencies_loss(config) <= last < first - 1.0


def test_evaluations_tell_whether_the_prefix_is_used(make_config):
    options = {"sketch_size": 8, "local_chunk": 32, "prefix_gain": 0.5}
    config = make_config(layers=2, attention_options=options, steps=2, eval_every=2, learning_rate=1e-6)
    train(config, progress=False)
    line = metrics_of(config)[-1]
    assert line["prefix_shares"].keys() == {"0", "1"}
    for heads in line["prefix_shares"].values():
        assert len(heads) == 2
        assert all(0.3 < share < 0.7 for share in heads)  # what the calibration before the first step was asked for
    assert line["chunk_start_loss"] > 0
    assert line["chunk_following_loss"] > 0


def test_what_a_batch_is_computed_in_does_not_change_the_calibration(make_config, tmp_path):
    options = {"sketch_size": 8, "local_chunk": 32, "prefix_gain": 0.5}
    gains = []
    for parts in (1, 2):
        config = make_config(attention_options=options, steps=1, accumulation=parts, out=tmp_path / f"in-{parts}")
        train(config, progress=False)
        begun = load_model_tensors(config.out / "checkpoints" / "step-00000000")
        gains.append([tensor for name, tensor in begun.items() if name.endswith("log_gain")])
    assert gains[0]
    assert all(map(torch.equal, *gains))


def test_a_context_within_one_local_chunk_is_pointed_out(make_config, capsys):
    train(make_config(attention_options={"local_chunk": 64}, steps=1))
    assert "note: a context of 64 lies within one local chunk of 64" in capsys.readouterr().err


def test_metrics_go_to_tensorboard_where_it_is_installed(make_config):
    pytest.importorskip("tensorboard")
    config = make_config(tensorboard=True, steps=2, eval_every=1)
    train(config, progress=False)
    written = b"".join(path.read_bytes() for path in (config.out / "tensorboard").iterdir())
    for name in (b"train/loss", b"evaluation/bits_per_byte", b"evaluation/prefix_shares/layer 0"):
        assert name in written


def test_the_same_seed_gives_the_same_run_and_another_seed_another(make_config, tmp_path, outcome):
    folders = [tmp_path / name for name in ("first", "second", "other")]
    for folder, seed in zip(folders, (3, 3, 4), strict=True):
        train(make_config(out=folder, seed=seed, steps=2), progress=False)
    first, second, other = (outcome(folder) for folder in folders)
    assert first["metrics"] == second["metrics"]
    assert first["metrics"] != other["metrics"]


def test_evaluating_and_logging_leave_the_computation_alone(make_config, tmp_path, outcome, monkeypatch):
    """Even if measuring and training both draw random numbers."""
    loss, shares = TransformerLM.loss, TransformerLM.prefix_shares
    monkeypatch.setattr(TransformerLM, "loss", lambda self, *batch: loss(self, *batch) * (1 + torch.rand(())))
    monkeypatch.setattr(TransformerLM, "prefix_shares", lambda self, ids: torch.rand(()) and shares(self, ids))
    often = outcome(train(make_config(out=tmp_path / "often", eval_every=1), progress=False).folder)
    never = outcome(train(make_config(out=tmp_path / "never", eval_every=0, log_every=6), progress=False).folder)
    assert all(torch.equal(often["tensors"][name], tensor) for name, tensor in never["tensors"].items())


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_gives_the_gradient_of_one_large_batch(make_config, accumulation):
    def gradients(parts):
        config = make_config(batch_size=4, accumulation=parts, clip=1e9)
        torch.manual_seed(0)
        model = build_model(make_plan(config))
        updater = Updater(model, config.step_options(), torch.float32)
        batch = torch.randint(0, 257, (4, 65), generator=torch.Generator().manual_seed(1))
        return updater.compute_gradient(batch), {name: p.grad for name, p in model.named_parameters()}

    (whole, expected), (parts, found) = gradients(1), gradients(accumulation)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.norm == pytest.approx(whole.norm, rel=1e-4)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * whole.norm)


def test_a_large_gradient_is_scaled_down_to_the_clip(make_config):
    config = make_config(clip=0.01)
    model = build_model(make_plan(config))
    gradient = Updater(model, config.step_options(), torch.float32).compute_gradient(torch.randint(0, 257, (2, 65)))
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
    assert gradient.norm > 0.1
    assert float(norm) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("number", first_always([signal.SIGTERM, signal.SIGINT]))
def test_a_signal_saves_and_stops(make_config, monkeypatch, number, tmp_path, assert_same_outcome):
    expected = train(make_config(out=tmp_path / "left-alone"), progress=False).folder
    config = make_config()
    loss = TransformerLM.loss
    calls = []

    def signalling(self, *batch):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return loss(self, *batch)

    before = signal.getsignal(number)
    monkeypatch.setattr(TransformerLM, "loss", signalling)
    result = train(config, progress=False)
    assert (result.step, result.stopped_by, result.signal_number) == (3, "signal", number)
    assert signal.getsignal(number) is before
    assert list_checkpoints(config.out / "checkpoints")[-1].name == "step-00000003"
    train(dataclasses.replace(config, resume=True), progress=False)
    assert_same_outcome(config.out, expected)


def test_a_time_limit_saves_and_stops(make_config):
    config = make_config(steps=100_000, max_minutes=0.005, eval_every=0, save_every=1000)
    result = train(config, progress=False)
    assert result.stopped_by == "time"
    assert 0 < result.step < 100_000
    assert list_checkpoints(config.out / "checkpoints")[-1].name == f"step-{result.step:08d}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run_with_the_step_and_what_to_try(make_config, monkeypatch, bad):
    loss = TransformerLM.loss
    calls = []

    def broken(self, *batch):
        calls.append(1)
        return loss(self, *batch) * (bad if len(calls) == 4 else 1.0)

    monkeypatch.setattr(TransformerLM, "loss", broken)
    config = make_config()
    with pytest.raises(
        RuntimeError, match=r"step 4: expected a finite loss.*step-00000002.*--learning-rate \(now 0.002"
    ):
        train(config, progress=False)
    checkpoint = load_checkpoint(list_checkpoints(config.out / "checkpoints")[-1])
    assert checkpoint.state["step"] == 2
    assert all(torch.isfinite(tensor).all() for tensor in checkpoint.model.values())
    assert max(line["step"] for line in metrics_of(config)) == 3


@pytest.mark.parametrize(
    ("speed_of_writing", "last_step"), [("at once", 2), ("late", 4)], indirect=["speed_of_writing"]
)
def test_a_full_disk_stops_the_run_with_one_clear_line_and_spares_the_last_checkpoint(
    speed_of_writing, last_step, make_config, disk, tmp_path, assert_same_outcome
):
    """Before the next step where it is known by then, else before the next checkpoint."""
    expected = train(make_config(out=tmp_path / "left-alone"), progress=False).folder
    second_save = [
        i for i, (name, paths) in enumerate(disk.log) if name == "make_folder" and "step-00000002" in str(paths)
    ]
    disk.restart()
    config = make_config()
    disk.fail_at, disk.torn = second_save[0] + 3, True
    disk.error = lambda path: OSError(errno.ENOSPC, "No space left on device", str(path))
    message = r"checkpoint of step 2 could not be written: No space left.*safe up to step-00000000.*--resume"
    with pytest.raises(OSError, match=message) as caught:
        train(config, progress=False)
    assert "\n" not in str(caught.value)
    assert [path.name for path in (config.out / "checkpoints").iterdir()] == [
        "step-00000000"
    ]  # the space is free again
    assert max(line["step"] for line in metrics_of(config)) == last_step
    disk.restart()
    train(dataclasses.replace(config, resume=True), progress=False)
    assert_same_outcome(config.out, expected)


def test_a_second_process_in_the_same_folder_is_refused(make_config):
    config = make_config()
    with FolderLock(RunFolder(config.out).lock), pytest.raises(RuntimeError, match=r"in use by process \d+"):
        train(config, progress=False)
    assert os.listdir(config.out) == ["lock"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 10**6}, r"--context 1000000: expected at least 1000001 training tokens in .*, found \d+"),
        ({"attention": "softmaxx"}, r"unknown attention mechanism 'softmaxx'.*softmax"),
        ({"attention_options": {"sketch": 3}}, r"no option 'sketch'"),
        ({"preset": "small"}, r"unknown preset 'small'.*gpt2-small"),
        ({"device": "abacus"}, r"--device: expected one of auto, cpu.*found 'abacus'"),
        ({"device": "cuda:77"}, r"--device: expected one of auto, cpu.*found 'cuda:77'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(make_config, changes, message):
    config = make_config(**changes)
    with pytest.raises(ValueError, match=message):
        train(config, progress=False)
    assert not config.out.exists()


def test_missing_data_is_refused(make_config, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        train(make_config(data=tmp_path / "nowhere"), progress=False)


def test_data_without_a_validation_split_is_refused_only_when_evaluating(make_config, data_folder, tmp_path):
    data = shutil.copytree(data_folder, tmp_path / "data")
    description = json.loads((data / "description.json").read_text())
    del description["splits"]["validation"], description["sha256"]
    (data / "description.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="--eval-every 0"):
        train(make_config(data=data), progress=False)
    assert train(make_config(data=data, eval_every=0, steps=1), progress=False).step == 1


def test_init_from_takes_the_weights_and_nothing_else(make_config, tmp_path):
    first = make_config(out=tmp_path / "first")
    train(first, progress=False)
    second = make_config(init_from=first.out, steps=2)
    train(second, progress=False)
    start = load_checkpoint(list_checkpoints(second.out / "checkpoints")[0])
    expected, _ = load_model(first.out)
    assert start.state["step"] == 0
    assert start.optimizer == {}
    assert all(torch.equal(start.model[name], tensor) for name, tensor in expected.state_dict().items())


def test_a_run_goes_on_without_the_run_whose_weights_it_took(make_config, tmp_path):
    first = make_config(out=tmp_path / "first", steps=1)
    train(first, progress=False)
    train(make_config(init_from=first.out, steps=1), progress=False)
    first.out.rename(tmp_path / "elsewhere")
    assert train(make_config(init_from=first.out, steps=2, resume=True, extend=True), progress=False).step == 2


def test_init_from_a_run_of_another_configuration_is_refused(make_config, tmp_path):
    first = make_config(out=tmp_path / "first", layers=2, steps=1)
    train(first, progress=False)
    with pytest.raises(ValueError, match=r"belongs to another model configuration.*blocks\.1"):
        train(make_config(init_from=first.out), progress=False)
    with pytest.raises(FileNotFoundError, match=r"expected a run folder made by"):
        train(make_config(init_from=tmp_path), progress=False)


def test_a_sketch_goes_on_with_the_weights_of_its_polynomial(make_config, tmp_path):
    first = make_config(out=tmp_path / "first", attention="polynomial", attention_options={"degree": 4}, steps=2)
    train(first, progress=False)
    sketched = {"attention": "polysketch-paper", "attention_options": {"local_chunk": 4}, "steps": 2}
    train(make_config(init_from=first.out, init_new=("feature_map",), **sketched), progress=False)
    run = make_config(**sketched)
    start = load_checkpoint(list_checkpoints(run.out / "checkpoints")[0]).model
    expected = load_model(first.out)[0].state_dict()
    assert all(torch.equal(start[name], tensor) for name, tensor in expected.items())
    assert {name.split(".feature_map.")[0] for name in start.keys() - expected.keys()} == {
        "blocks.0.attention.mechanism"
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"it lacks blocks.*feature_map.* and has nothing in excess"),
        (
            {"init_new": ("feature_map", "query_norm")},
            "expected new parts of the model that .* lacks, found 'query_norm'",
        ),
        ({"init_new": ("nope",)}, "expected new parts of the model that .* lacks, found 'nope'"),
        ({"init_new": ("feature_map",), "layers": 2}, r"it lacks blocks\.1"),
    ],
)
def test_what_is_not_named_as_new_is_asked_of_the_other_run(changes, message: str, make_config, tmp_path):
    first = make_config(out=tmp_path / "first", attention="polynomial", attention_options={}, steps=1)
    train(first, progress=False)
    with pytest.raises(ValueError, match=message):
        train(make_config(init_from=first.out, attention="polysketch-paper", attention_options={}, **changes))


def test_new_parts_need_another_run(make_config):
    with pytest.raises(ValueError, match="--init-new: expected --init-from beside it, found feature_map alone"):
        make_config(init_new=("feature_map",))


def test_load_model_gives_the_trained_model_and_what_goes_with_it(make_config, data_folder):
    config = make_config(keep=5)
    train(config, progress=False)
    model, description = load_model(config.out)
    saved = load_checkpoint(config.out / "checkpoints" / "step-00000006").model
    assert not model.training
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert (description.step, description.context_length, description.data) == (6, 64, data_folder.resolve())
    assert description.tokenizer.decode(description.tokenizer.encode("text")) == "text"
    earlier, description = load_model(config.out, checkpoint="step-00000002")
    assert description.step == 2
    assert not torch.equal(earlier.embedding.weight, model.embedding.weight)


def test_load_model_refuses_a_checkpoint_of_another_configuration(make_config):
    config = make_config(steps=1)
    train(config, progress=False)
    run = RunFolder(config.out)
    saved = run.read_config()
    saved["model"]["feedforward_size"] += 8
    run.write_config(saved)
    with pytest.raises(ValueError, match=r"another model configuration: blocks\S+: expected shape .*, found"):
        load_model(config.out)


def test_load_model_needs_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a run folder made by `polysketch train`"):
        load_model(tmp_path)


def test_progress_tells_loss_speed_and_time_left(make_config, capsys):
    train(make_config(steps=2))
    shown = capsys.readouterr().err
    assert "parameters on cpu, a new run" in shown
    assert "step 2/2  loss " in shown
    assert "tokens/s" in shown
    assert "left" in shown
    assert "validation loss" in shown


def test_slow_steps_are_told_between_lines_of_metrics(make_config, monkeypatch, capsys):
    """Whoever waits for the first of a thousand steps sees each of them, and metrics have the last alone."""
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN", {True: 0.0, False: 0.0})
    config = make_config(steps=3, log_every=1000)
    train(config)
    shown = capsys.readouterr().err
    assert all(f"step {step}/3  loss " in shown for step in (1, 2, 3))
    lines = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [3]


def test_a_long_run_says_once_how_long_and_what_to_do(monkeypatch, capsys):
    seconds = iter(range(0, 10**6, 10))
    monkeypatch.setattr(reporting.time, "monotonic", lambda: next(seconds))
    progress = reporting.Progress(0, 10_000, enabled=True)
    for step in range(1, 9):
        progress.update(step, 1.0, 100.0)
    shown = capsys.readouterr().err
    assert shown.count("note: about ") == 1
    assert "to go at this speed" in shown
    assert "--max-minutes 30" in shown
    short = reporting.Progress(0, 10, enabled=True)
    for step in range(1, 9):
        short.update(step, 1.0, 100.0)
    assert "note" not in capsys.readouterr().err
