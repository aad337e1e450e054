"""Damage is found before it is used, and what is another run's is not taken for this one's."""

import dataclasses
import json
import os
import shutil

import pytest

from polysketch.training import TrainingConfig, load_model, loading, train, trainer, verification
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.run_folder import RunFolder
from polysketch.training.verification import verify


@pytest.fixture
def config(make_config) -> TrainingConfig:
    return make_config(steps=2, save_every=1, eval_every=0)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_new_run_refuses_a_damaged_token_file(make_config, data_folder, tmp_path, split):
    data = shutil.copytree(data_folder, tmp_path / "damaged")
    content = bytearray((data / f"{split}.bin").read_bytes())
    content[len(content) // 3] ^= 1
    (data / f"{split}.bin").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{split}\.bin with sha256 .* the file was altered or damaged"):
        train(make_config(data=data), progress=False)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_checkpoint_of_another_run_is_refused(config, tmp_path):
    """Whole, verified, of the same sizes: only the seed is another."""
    train(config, progress=False)
    other = dataclasses.replace(config, out=tmp_path / "other", seed=1)
    train(other, progress=False)
    newest = RunFolder(config.out).checkpoints / "step-00000002"
    shutil.rmtree(newest)
    shutil.copytree(RunFolder(other.out).checkpoints / "step-00000002", newest)
    with pytest.raises(ValueError, match=r"expected a checkpoint of the run in this folder .* found one of another"):
        load_model(config.out)
    with pytest.raises(ValueError, match="found one of another"):
        train(dataclasses.replace(config, resume=True), progress=False)
    load_model(config.out, checkpoint="step-00000001")


def test_a_run_may_be_moved_and_its_identity_stays_when_it_is_extended(config, tmp_path):
    train(config, progress=False)
    identity = RunFolder(config.out).identity()
    moved = config.out.rename(tmp_path / "moved")
    longer = dataclasses.replace(config, out=moved, resume=True, extend=True, steps=3)
    assert train(longer, progress=False).step == 3
    assert RunFolder(moved).identity() == identity
    load_model(moved)


def test_a_run_from_before_runs_had_an_identity_goes_on(config):
    train(config, progress=False)
    run = RunFolder(config.out)
    saved = run.read_config()
    del saved["identity"]
    run.write_config(saved)
    for path in run.checkpoints.iterdir():
        strip(path)
    assert train(dataclasses.replace(config, resume=True, extend=True, steps=3), progress=False).step == 3
    load_model(config.out)


def strip(checkpoint) -> None:
    """Make of it what earlier versions wrote."""
    from polysketch.training.manifest import MANIFEST, describe, manifest_bytes

    state = json.loads((checkpoint / "state.json").read_bytes())
    del state["run"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    files = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
    files["state.json"] = describe((checkpoint / "state.json").read_bytes())
    (checkpoint / MANIFEST).write_bytes(manifest_bytes(files))


def test_more_layers_than_there_are_weights_are_refused_before_any_is_built(config, monkeypatch):
    train(config, progress=False)
    run = RunFolder(config.out)
    saved = run.read_config()
    saved["model"]["num_layers"] = 2_000_000
    run.write_config(saved)
    monkeypatch.setattr(loading, "ModelConfig", None)  # which goes through all layers
    with pytest.raises(ValueError, match="expected weights of 2,000,000 layers, found"):
        load_model(config.out)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("vocab_size", 10_000_000, "expected an embedding of 10000000 tokens in"),
        ("hidden_size", 2**20, "expected an embedding of 257 tokens in 1048576 numbers"),
        ("head_dim", 2**20, r"weights for num_heads \* head_dim of"),
        ("feedforward_size", 2**30, "weights for feedforward_size of 1,073,741,824"),
    ],
)
def test_no_memory_is_taken_for_sizes_without_weights(config, monkeypatch, name, value, said):
    """A vocabulary of ten million took 5.2 GB before it was compared."""
    train(config, progress=False)
    run = RunFolder(config.out)
    saved = run.read_config()
    saved["model"][name] = value
    run.write_config(saved)
    monkeypatch.setattr(loading, "TransformerLM", None)  # which allocates
    with pytest.raises(ValueError, match=said):
        load_model(config.out)


def test_a_reader_of_the_latest_checkpoint_goes_on_to_the_next_when_it_is_deleted(config, monkeypatch):
    """With --keep 1 the writer deletes what somebody reads."""
    train(config, progress=False)
    run, read = RunFolder(config.out), loading.load_model_tensors
    latest = run.checkpoints / "step-00000002"

    def deleted_meanwhile(path):
        if latest.exists():
            shutil.rmtree(latest)
        return read(path)

    monkeypatch.setattr(loading, "load_model_tensors", deleted_meanwhile)
    assert load_model(config.out)[1].step == 1


def test_a_damaged_checkpoint_that_stays_is_refused(config):
    train(config, progress=False)
    (RunFolder(config.out).checkpoints / "step-00000002" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="the checkpoint is damaged"):
        load_model(config.out)


def lines(count: int) -> list[bytes]:
    return [json.dumps({"kind": "train", "step": step}).encode() + b"\n" for step in range(1, count + 1)]


@pytest.mark.parametrize("damage", [b"{broken", b"[]", b'{"step": "2"}', b"\0\0\0"], ids=repr)
def test_a_damaged_line_of_metrics_costs_no_other_and_is_told(tmp_path, damage):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    whole = lines(6)
    content = b"".join([whole[0], damage + b"\n", *whole[2:], b'{"torn'])
    metrics.path.write_bytes(content)
    assert [line["step"] for line in metrics.read()] == [1, 3, 4, 5, 6]
    assert metrics.drop_after(4) == 1
    assert metrics.path.read_bytes() == b"".join([whole[0], whole[2], whole[3]])
    assert (tmp_path / "metrics-damaged.jsonl").read_bytes() == content


def test_the_metrics_of_another_run_are_not_taken_for_this_ones(config, tmp_path, capsys):
    """The whole file of a run of another seed, in the folder of this one: told by verify, and left out by resume."""
    other = dataclasses.replace(config, out=tmp_path / "other", seed=config.seed + 1)
    for each in (config, other):
        train(each, progress=False)
    run, foreign = RunFolder(config.out), RunFolder(other.out).metrics.read_bytes()
    run.metrics.write_bytes(foreign)
    assert any("of another run" in problem for problem in verify(config.out).problems)
    train(dataclasses.replace(config, resume=True))
    assert "damaged or of another run, were left out" in capsys.readouterr().err
    assert run.open_metrics().read() == []
    assert (config.out / "metrics-damaged.jsonl").read_bytes() == foreign


def test_an_end_that_a_kill_leaves_is_no_damage(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.path.write_bytes(b"".join(lines(3)) + b"\0\0\0\n" + b'{"torn')
    assert metrics.drop_after(3) == 0
    assert metrics.path.read_bytes() == b"".join(lines(3))
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_run_whose_plot_cannot_be_written_is_finished_all_the_same(config, monkeypatch, capsys):
    def fail(lines, path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(trainer, "plot_loss", fail)
    assert train(config).stopped_by == "finished"
    assert "note: no plot of the loss" in capsys.readouterr().err


def test_other_native_programs_are_told(config, capsys):
    train(config, progress=False)
    run = RunFolder(config.out)
    saved = run.read_config()
    saved["environment"]["native programs"] = "others"
    run.write_config(saved)
    train(dataclasses.replace(config, resume=True))
    assert "native programs was others when the run started" in capsys.readouterr().err


def test_the_tokenizer_of_another_run_is_refused(config, make_config, data_folder, tmp_path):
    """Whole, and of its own data: only that data is not what this run learned from."""
    train(config, progress=False)
    other = shutil.copytree(data_folder, tmp_path / "other-data")
    description = json.loads((other / "description.json").read_text())
    (other / "description.json").write_text(json.dumps(description, indent=None))  # the same, by other bytes
    train(make_config(data=other, out=tmp_path / "other", steps=2), progress=False)
    run = RunFolder(config.out)
    assert load_model(config.out)[1].tokenizer is not None
    assert verify(config.out).problems == ()
    shutil.rmtree(run.tokenizer)
    shutil.copytree(tmp_path / "other" / "tokenizer", run.tokenizer)
    with pytest.raises(ValueError, match=r"expected the description of the data that the run learned from"):
        _ = load_model(config.out)[1].tokenizer
    assert any("copied from another run" in problem for problem in verify(config.out).problems)


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_not_called_damaged(config, monkeypatch):
    train(config, progress=False)
    run, read = RunFolder(config.out), verification.read_verified

    def deleted_meanwhile(path, name):
        if path.name == "step-00000001" and path.exists():
            shutil.rmtree(path)
        return read(path, name)

    monkeypatch.setattr(verification, "read_verified", deleted_meanwhile)
    assert verify(config.out).problems == ()
    (run.checkpoints / "step-00000002" / "random.safetensors").unlink()
    assert len(verify(config.out).problems) == 1
