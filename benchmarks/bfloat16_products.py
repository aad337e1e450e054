"""What takes a processor that multiplies in bfloat16: break-even with SDPA, and a training step, both in bfloat16."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import targets
from benchmarks.break_even import break_even
from benchmarks.figures import Figure, Found
from polysketch.benchmarking import TrainingSettings, Workbench, time_attention
from polysketch.benchmarking.models import build_model, training_step
from polysketch.benchmarking.timing import ratio
from polysketch.benchmarking.training_steps import check_attention
from polysketch.ops.native import bfloat16

WITHOUT = "break-even in bfloat16, and its training step: no bfloat16 products here"


def section(bench: Workbench, settings: Sequence[Any]) -> Found:
    """Both figures, of one mechanism and one model, the last of each settings; without such products one line."""
    if not has_products():
        return Found(skipped=[WITHOUT])
    attention, training = settings
    half = replace(bench, dtype=torch.bfloat16)
    times = [{**one, "direction": f"{one['direction']} in bfloat16"} for one in time_attention(half, attention)]
    return Found([_break_even(times), _training_step(bench, half, training)], times)


def has_products() -> bool:
    """Whether this processor has instructions for products in bfloat16; without them PyTorch's own take minutes."""
    try:
        return bfloat16.instructions() != bfloat16.Instructions.PLAIN_VECTORS
    except RuntimeError:  # no programs, which know
        return False


def _break_even(times: Sequence[dict[str, Any]]) -> Figure:
    """Infinite where SDPA is faster even at the longest length."""
    series = times[-1]["series"]
    speeds = {one["length"]: one["ratio"] for one in times if one["series"] == series}
    found, lengths = break_even(speeds), f"measured from {min(speeds):,} to {max(speeds):,} tokens"
    title = f"{times[-1]['direction']}, {series}: break-even with sdpa"
    return Figure(title, math.inf if found is None else found, "tokens", targets.BREAK_EVEN, lengths)


def _training_step(single: Workbench, half: Workbench, settings: TrainingSettings) -> Figure:
    """The step in float32 over that in bfloat16, in turns, each of a model of its own."""
    context, name = settings.contexts[-1], settings.models[-1]
    for bench in (single, half):
        check_attention(bench, settings)
    models = [build_model(name, settings.preset, settings.sizes) for _ in range(2)]
    ids = torch.randint(models[0].config.vocab_size, (settings.batch, context + 1))
    dtypes = (single.dtype, half.dtype)
    steps = {str(dtype): training_step(model, ids, dtype) for model, dtype in zip(models, dtypes, strict=True)}
    say = single.saying(f"training at {context:,}")
    whole, halved = single.clock.alternate(steps, repeats=single.repeats, progress=say).values()
    title = f"training step of {settings.preset} at {context:,}, {name}: bfloat16, times as fast as float32"
    return Figure(title, ratio(whole, halved), target=targets.BFLOAT16_STEP)
