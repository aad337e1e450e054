"""Every causal mechanism through the commands: it trains, resumes to the same weights, evaluates and generates."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from polysketch.attention import MECHANISMS
from polysketch.cli import main
from polysketch.data import PreparedData
from polysketch.models import TransformerLM
from polysketch.nn import SHORT_CONVOLUTION
from polysketch.training import load_model, trainer
from polysketch.training.checkpoint import list_checkpoints, load_checkpoint

CONTEXT, STEPS = 48, 3
OPTIONS = {
    "polysketch-paper": ["sketch_size=8", "local_chunk=16", "prefix_gain=0.5"],
    "polysketch-heavy": ["sketch_size=8", "local_chunk=16", "heavy_size=4", "hash_bits=2", "prefix_gain=0.4"],
    "sliding-window": ["window=16"],
    "local": ["local_chunk=16"],
    "performer": ["num_features=32"],
    "llops": ["num_features=32"],
    "based,sliding-window": ["sliding-window.window=16", "based.feature_dim=8"],
}
"""Options at which every part of a mechanism is used within the context; none for the others."""

LAYERS = [*(name for name, kind in MECHANISMS.items() if kind.is_causal), SHORT_CONVOLUTION, "based,sliding-window"]

SHOWN = (
    "softmax",
    "polysketch-heavy",
    "based,sliding-window",
)
"""A state of each kind; the others are in the full product."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk, no plots."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(trainer, "plot_loss", lambda lines, path: False)


def train(name: str, data: Path, out: Path, *more: str) -> int:
    """Run the training command for a few steps of `tiny`, cut down to two layers."""
    sizes = ["--preset", "tiny", "--layers", "2", "--context", str(CONTEXT), "--batch-size", "2"]
    rhythm = ["--steps", str(STEPS), "--warmup", "0", "--log-every", "1", "--save-every", "1", "--keep", "9"]
    nothing_else = ["--eval-every", "0", "--no-tensorboard"]
    machine = ["--device", "cpu", "--threads", "1"]
    options = ["--attention", name, "--attention-options", *OPTIONS.get(name, [])]
    return main(
        ["train", "--data", str(data), "--out", str(out), *sizes, *rhythm, *nothing_else, *machine, *more, *options]
    )


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def tensors(out: Path) -> dict[str, torch.Tensor]:
    last = load_checkpoint(list_checkpoints(out / "checkpoints")[-1])
    return {**last.model, **last.optimizer, **last.random}


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    """The object that a command with --json prints."""
    capsys.readouterr()
    assert main([*arguments, "--json", "--device", "cpu"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def check_resumed(name: str, data: Path, whole: Path, again: Path) -> None:
    """From its checkpoint after the first step the run ends as it did, bit for bit."""
    shutil.copytree(whole, again)
    assert train(name, data, again, "--resume", "--checkpoint", "step-00000001") == 0
    assert sum(1 for _ in again.glob("checkpoints/*step-00000002")) == 2  # the old one set aside, and a new one
    assert losses(again) == losses(whole)
    found, expected = tensors(again), tensors(whole)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def check_evaluation(model: TransformerLM, data: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of the command, which reads a window in spans, is that of the model, which sees it whole."""
    sizes = ["--context", str(CONTEXT), "--span", "20", "--max-tokens", str(CONTEXT - 1)]
    found = shown(["evaluate", str(out), *sizes], capsys)
    window = torch.as_tensor(PreparedData.open(data).split("test").tokens[:CONTEXT].astype("int64"))
    assert found["num_tokens"] == CONTEXT - 1
    assert found["loss"] == pytest.approx(model.loss(window[None]).item(), rel=1e-4)


def check_generation(model: TransformerLM, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every token generated with the state is the most probable one of the model that sees all before it anew."""
    prompt = "The quick brown fox jumps"
    given = ["--prompt", prompt, "--max-new-tokens", "12", "--temperature", "0"]
    generated = shown(["generate", str(out), *given], capsys)["tokens"][0]
    ids = torch.tensor([[*prompt.encode(), *generated]])
    logits = model(ids)[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
    torch.testing.assert_close(chosen, logits.amax(1), atol=1e-3, rtol=1e-4)
    cached, _ = model.extend(ids[:, :-1], model.init_state(1))
    torch.testing.assert_close(cached, model(ids[:, :-1]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in SHOWN)) for name in LAYERS]
)
@torch.no_grad()
def test_it_trains_resumes_evaluates_and_generates(name, data_folder, tmp_path, capsys):
    whole = tmp_path / "whole"
    with torch.enable_grad():
        assert train(name, data_folder, whole) == 0
        check_resumed(name, data_folder, whole, tmp_path / "again")
    assert len(losses(whole)) == STEPS
    assert losses(whole)[-1] < losses(whole)[0]
    model, _ = load_model(whole)
    check_evaluation(model, data_folder, whole, capsys)
    check_generation(model, whole, capsys)


@pytest.mark.parametrize("name", [name for name, kind in MECHANISMS.items() if not kind.is_causal])
def test_what_cannot_be_causal_is_refused_before_a_folder_is_made(name, data_folder, tmp_path, capsys):
    assert train(name, data_folder, tmp_path / "run") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name!r} cannot be causal" in line
    assert "causal mechanisms: " in line
    assert "polysketch-paper" in line
    assert not (tmp_path / "run").exists()
