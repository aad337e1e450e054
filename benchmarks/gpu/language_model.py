"""Training steps of gpt2-small at several contexts, with softmax and with polysketch attention."""

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cases import Bench, Cases, Labels
from polysketch.benchmarking import models
from polysketch.benchmarking.timing import peak_memory
from polysketch.benchmarking.way_names import Sizes
from polysketch.models import TransformerLM

MODELS = {
    "softmax": ("softmax", 32),
    "random r=32": ("random", 32),
    "learned r=32": ("learned", 32),
    "polysketch": ("polysketch", 32),
    "polysketch, every second layer": ("polysketch/2", 32),
    "random r=64": ("random", 64),
    "learned r=64": ("learned", 64),
}
"""Every model that is timed: the way its layers attend, and its sketch size."""

LARGEST = "largest"
"""A batch of as many rows as fit the device."""

_STEP_TOKENS = 2**15
_LOCAL_CHUNK = 256


def series_of(labels: Labels) -> tuple:
    """The series that a case of these models is a point of."""
    return labels["model"], labels["batch"] == LARGEST


def build_model(name: str, device: torch.device, *, quick: bool) -> TransformerLM:
    """gpt2-small with one of `MODELS`, or a tiny model."""
    attention, sketch_size = MODELS[name]
    small = {"num_layers": 2, "vocab_size": 300} if quick else {}
    sizes = Sizes(sketch_size, 16 if quick else _LOCAL_CHUNK)
    with device:  # weights are drawn where they stay: on the CPU that takes longer than what is timed
        return models.build_model(attention, "tiny" if quick else "gpt2-small", sizes, **small)


def time_training(bench: Bench) -> None:
    """Steps of constant tokens, bfloat16 autocast and AdamW, at several contexts."""
    tokens, lengths = (128, [32, 64]) if bench.quick else (_STEP_TOKENS, [2**15, 2**11, 2**13, 2**12, 2**14])
    points = [{"model": name, "batch": tokens // length, "length": length} for length in lengths for name in MODELS]
    points = [one for one in points if not bench.match or any(part in one["model"] for part in bench.match)]
    Cases("train", bench, series_of, partial(_train, bench)).run(points)


def _train(bench: Bench, labels: Labels) -> dict[str, Any]:
    model = build_model(labels["model"], bench.device, quick=bench.quick)
    shape = (labels["batch"], labels["length"] + 1)
    ids = torch.randint(model.config.vocab_size, shape, device=bench.device)
    step = models.training_step(model, ids, torch.bfloat16)
    peak = peak_memory(bench.device, step)
    timing = bench.clock.measure(step, limit_seconds=1.0)
    floor = models.training_floor(model, labels["batch"], labels["length"])
    rate = labels["batch"] * labels["length"] / timing.seconds
    counted = {"operations": floor.operations, "floor_seconds": floor.seconds(bench.rates)}
    return {**vars(timing), "tokens_per_second": rate, "peak_bytes": peak, **counted}
