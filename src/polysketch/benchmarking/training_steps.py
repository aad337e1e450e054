"""Training steps of a language model at several contexts, against the same model with softmax attention."""

from collections.abc import Callable
from typing import Any

import torch

from polysketch.benchmarking import memory
from polysketch.benchmarking.attention_alone import check_agreement
from polysketch.benchmarking.models import BASELINE, build_model, training_floor, training_step
from polysketch.benchmarking.settings import AttentionSettings, TrainingSettings
from polysketch.benchmarking.timing import peak_memory
from polysketch.benchmarking.way_names import attentions, with_baseline
from polysketch.benchmarking.workbench import Workbench
from polysketch.models import TransformerLM, preset


def time_training(bench: Workbench, settings: TrainingSettings) -> list[dict[str, Any]]:
    """Forward, backward, clipping and AdamW on one batch, the models taking turns.

    Returns:
        A measurement for each context and model, the baseline first: length, series, seconds (the median),
        all_seconds, ratio (times as fast as the baseline: the median over neighbours in time), tokens_per_second,
        floor_seconds, operations, bytes, peak_bytes (None unless asked for: of a process with model and optimizer on a
        CPU, beyond model and optimizer on a GPU).

    Raises:
        ValueError: attention that disagrees with the reference; nothing has been timed then.
    """
    check_attention(bench, settings)
    names = with_baseline(settings.models, BASELINE)
    models = {
        name: build_model(name, settings.preset, settings.sizes, **settings.changes).to(bench.device) for name in names
    }
    found = [_time_context(bench, settings, models, context) for context in settings.contexts]
    return [one for measurements in found for one in measurements]


def check_attention(bench: Workbench, settings: TrainingSettings) -> None:
    """Compare attention of the models' shapes, forward and backward, with the reference."""
    config = preset(settings.preset)
    asked = AttentionSettings(
        lengths=settings.contexts,
        mechanisms=attentions(settings.models),
        batch=settings.batch,
        heads=config.num_heads,
        head_dim=config.head_dim,
        sketch_size=settings.sketch_size,
        local=settings.local,
        backward=True,
    )
    check_agreement(bench, asked)


def _time_context(
    bench: Workbench, settings: TrainingSettings, models: dict[str, TransformerLM], context: int
) -> list[dict[str, Any]]:
    vocabulary = models[BASELINE].config.vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (settings.batch, context + 1), generator=generator).to(bench.device)
    steps = {name: training_step(model, ids, bench.dtype) for name, model in models.items()}
    say = bench.saying(f"training at {context:,}")
    seconds = bench.clock.alternate(steps, repeats=bench.repeats, progress=say)
    floor_of = {name: training_floor(model, settings.batch, context) for name, model in models.items()}
    return [
        {
            "direction": _direction(settings),
            "length": context,
            "series": name,
            **bench.measurement(seconds, name, BASELINE, settings.batch * context, floor_of[name]),
            "peak_bytes": _peak(bench, settings, name, context, steps[name]),
        }
        for name in models
    ]


def _direction(settings: TrainingSettings) -> str:
    layers = "" if settings.layers is None else f" with {settings.layers} layers"
    return f"training step of {settings.preset}{layers}"


def _peak(
    bench: Workbench, settings: TrainingSettings, name: str, context: int, step: Callable[[], None]
) -> int | None:
    if not settings.memory:
        return None
    if bench.device.type == "cuda":
        return peak_memory(bench.device, step)
    return memory.training(settings, name, context, bench.dtype)
