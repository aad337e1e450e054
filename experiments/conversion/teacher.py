"""The softmax model that is converted: a small Llama, trained on the corpus, and its tokenizer beside it."""

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.conversion.corpus import recall_passages
from experiments.conversion.recall import labelled
from polysketch.data import PreparedData, TrainingWindows
from polysketch.integrations.language_model import HuggingFaceLM
from polysketch.storage import whole_folder
from polysketch.training.reporting import Progress
from polysketch.training.step import build_optimizer, learning_rate_at


@dataclass(frozen=True)
class TeacherSettings:
    """Size and training of the softmax model.

    Attributes:
        hidden_size, layers, heads, kv_heads, feedforward_size: of the Llama; heads are hidden_size / heads wide.
        context: tokens of a training window.
        batch_size: windows of a step.
        passages: recall passages of a step, beside the windows; the loss of their answers is added to that of the
            windows, for answers are too few of all tokens for a small model to learn to look back in minutes.
        steps: optimizer steps.
        learning_rate: peak of the schedule, which rises over a tenth of the steps and then falls to zero.
        seed: of weights and data.
    """

    hidden_size: int = 128
    layers: int = 2
    heads: int = 2
    kv_heads: int = 2
    feedforward_size: int = 256
    context: int = 512
    batch_size: int = 4
    passages: int = 48
    steps: int = 2400
    learning_rate: float = 3e-3
    seed: int = 0


def teacher(settings: TeacherSettings, data: PreparedData, pairs: int, out: Path) -> Path:
    """The folder of the trained model: `out`, made now unless it is there already.

    Args:
        settings: size and training.
        data: text with recall passages.
        pairs: pairs of words of a passage.
        out: the folder.
    """
    if (out / "config.json").is_file():
        return out
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(_config(settings, data.tokenizer.vocab_size))
    _train(HuggingFaceLM(model.train()), settings, data, pairs)
    with whole_folder(out) as temporary:
        model.save_pretrained(temporary)
    return out


def with_fresh_attention(model: Path, out: Path) -> Path:
    """The folder `out` of the same model with the projections of all attention drawn anew: a control."""
    fresh = LlamaForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    for layer in fresh.model.layers:
        for projection in (
            layer.self_attn.q_proj,
            layer.self_attn.k_proj,
            layer.self_attn.v_proj,
            layer.self_attn.o_proj,
        ):
            torch.nn.init.normal_(projection.weight, std=fresh.config.initializer_range)
    fresh.save_pretrained(out)
    return out


def _config(settings: TeacherSettings, vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.feedforward_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=4 * settings.context,
        tie_word_embeddings=True,
        initializer_range=settings.hidden_size**-0.5,  # the usual 0.02 is for models ten times as wide
        bos_token_id=None,
        eos_token_id=None,
    )


def _train(model: HuggingFaceLM, settings: TeacherSettings, data: PreparedData, pairs: int) -> None:
    rate = settings.learning_rate
    optimizer = build_optimizer(model, learning_rate=rate, betas=(0.9, 0.95), weight_decay=0.1)
    windows = TrainingWindows(data.split("train").tokens, settings.context, settings.seed)
    passages = recall_passages("train", settings.steps * settings.passages, pairs)
    progress = Progress(0, settings.steps)
    for step in range(settings.steps):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, steps=settings.steps, warmup=settings.steps // 10, peak=rate)
        ids, labels = labelled(data.tokenizer, list(itertools.islice(passages, settings.passages)), pairs)
        optimizer.zero_grad()
        loss = model.loss(windows.batch(step, settings.batch_size)) + _answer_loss(model, ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens = settings.batch_size * settings.context + ids.numel()
        progress.update(step + 1, float(loss.detach()), tokens / (time.perf_counter() - started))
    progress.close()


def _answer_loss(model: HuggingFaceLM, ids: Tensor, labels: Tensor) -> Tensor:
    losses = model.token_losses(model.hidden_states(ids), labels)
    return losses.sum() / (labels >= 0).sum()
