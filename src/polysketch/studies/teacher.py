"""The softmax model that is converted: a small Llama, trained on books and recall passages."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polysketch.data import PreparedData, TrainingWindows
from polysketch.integrations.language_model import HuggingFaceLM
from polysketch.integrations.transformers_folder import new_model, read_model
from polysketch.storage import disk, whole_folder
from polysketch.studies.finished import Stopped
from polysketch.studies.in_turn import one_at_a_time
from polysketch.studies.passages import labelled, recall_passages
from polysketch.training.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from polysketch.training.environment import resolve_device
from polysketch.training.loop import StopRequests
from polysketch.training.reporting import Progress
from polysketch.training.step import build_optimizer, learning_rate_at
from polysketch.training.tensors import load_optimizer_tensors, optimizer_tensors, random_tensors, trained_parameters

if TYPE_CHECKING:
    from polysketch.studies.linearise import LineariseSettings

_SEED, _FRESH_SEED = 0, 1
_CHECKPOINTS = 40
"""Times that a model is saved while it learns: every few minutes, on two cores."""
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def teacher(settings: LineariseSettings, data: PreparedData, out: Path) -> Path:
    """The folder of the trained model: `out`, made now unless it is there already.

    Training that was stopped or killed goes on from its last checkpoint, in a folder beside `out`. Where another
    process trains it, this one waits.

    Args:
        settings: size and training.
        data: text with recall passages.
        out: the folder.

    Raises:
        Stopped: a signal asked for it; all steps are saved.
    """
    checkpoints = out.with_name(f"{out.name}-checkpoints")
    with one_at_a_time(out.parent):
        if not (out / "config.json").is_file():
            torch.manual_seed(_SEED)
            model = new_model(_config(settings, data.tokenizer.vocab_size)).to(resolve_device("auto"))
            _train(HuggingFaceLM(model.train()), settings, data, checkpoints)
            with whole_folder(out) as temporary:
                model.save_pretrained(temporary)
        if checkpoints.is_dir():
            disk.delete_tree(checkpoints)
    return out


def with_fresh_attention(model: Path, out: Path) -> Path:
    """The folder `out` of the same model with the projections of all attention drawn anew: a control."""
    fresh = read_model(model)
    torch.manual_seed(_FRESH_SEED)
    for layer in fresh.model.layers:
        for name in _PROJECTIONS:
            weight = getattr(layer.self_attn, name).weight
            torch.nn.init.normal_(weight, std=fresh.config.initializer_range)
    fresh.save_pretrained(out)
    return out


def _config(settings: LineariseSettings, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.feedforward_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "max_position_embeddings": 4 * settings.context,
        "tie_word_embeddings": True,
        "initializer_range": settings.hidden_size**-0.5,  # the usual 0.02 is for models ten times as wide
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _train(model: HuggingFaceLM, settings: LineariseSettings, data: PreparedData, checkpoints: Path) -> None:
    rate, steps = settings.model_learning_rate, settings.model_steps
    optimizer = build_optimizer(model, learning_rate=rate, betas=(0.9, 0.95), weight_decay=0.1)
    windows = TrainingWindows(data.split("train").tokens, settings.context, _SEED)
    passages = recall_passages("train", steps * settings.model_passages, settings.pairs)
    device = next(model.parameters()).device
    checkpoints.mkdir(exist_ok=True)
    first = _load_last(checkpoints, model, optimizer)
    passages = itertools.islice(passages, first * settings.model_passages, None)
    progress = Progress(first, steps)
    with StopRequests() as stop:
        for step in range(first, steps):
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, steps=steps, warmup=steps // 10, peak=rate)
            asked = list(itertools.islice(passages, settings.model_passages))
            ids, labels = (each.to(device) for each in labelled(data.tokenizer, asked, settings.pairs))
            optimizer.zero_grad()
            batch = windows.batch(step, settings.model_batch_size).to(device)
            loss = model.loss(batch) + _answer_loss(model, ids, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tokens = settings.model_batch_size * settings.context + ids.numel()
            progress.update(step + 1, float(loss.detach()), tokens / (time.perf_counter() - started))
            if stop.signal_number is not None or (step + 1) % max(1, steps // _CHECKPOINTS) == 0:
                _save(checkpoints, step + 1, model, optimizer)
            if stop.signal_number is not None:
                progress.close()
                raise Stopped(stop.signal_number)
    progress.close()


def _save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights = {name: weight.detach() for name, weight in trained_parameters(model).items()}
    checkpoint = Checkpoint(weights, optimizer_tensors(model, optimizer), random_tensors(), {"step": step})
    save_checkpoint(folder, checkpoint.copied(), keep=1)


@torch.no_grad()
def _load_last(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Go back to the last checkpoint; returns the steps made until then. Nothing is drawn between steps."""
    found = list_checkpoints(folder)
    if not found:
        return 0
    checkpoint = load_checkpoint(found[-1])
    for name, weight in trained_parameters(model).items():
        weight.copy_(checkpoint.model[name])
    load_optimizer_tensors(model, optimizer, checkpoint.optimizer)
    return int(checkpoint.state["step"])


def _answer_loss(model: HuggingFaceLM, ids: Tensor, labels: Tensor) -> Tensor:
    losses = model.token_losses(model.hidden_states(ids), labels)
    return losses.sum() / (labels >= 0).sum()
