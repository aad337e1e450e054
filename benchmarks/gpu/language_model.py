"""Training steps of gpt2-small at several contexts, with softmax and with polysketch attention."""

from typing import Any

import torch

from benchmarks.budget import Budget
from benchmarks.gpu.cases import Cases, Labels
from benchmarks.journal import Journal
from polysketch.benchmarking import floors, models
from polysketch.benchmarking.timing import Clock, Rates, peak_memory
from polysketch.benchmarking.ways import Sizes
from polysketch.models import TransformerLM

MODELS = {
    "softmax": ("softmax", 32),
    "random r=32": ("random", 32),
    "learned r=32": ("learned", 32),
    "random r=64": ("random", 64),
    "learned r=64": ("learned", 64),
}
"""Every model that is timed: the way its layers attend, and its sketch size."""

LARGEST = "largest"
"""A batch of as many rows as fit the device."""

_STEP_TOKENS = 2**15
_LOCAL_CHUNK = 256


def model_cases(kind: str, device: torch.device, section: Budget, journal: Journal) -> Cases:
    """Cases of the models above."""
    return Cases(kind, device, section, journal, lambda labels: (labels["model"], labels["batch"] == LARGEST))


def describe(record: dict[str, Any]) -> str:
    """What is printed of a model's case."""
    share = record["floor_seconds"] / record["seconds"]
    return f"{record['tokens_per_second']:,.0f} tokens/s, {share:.1%} of the floor"


def build_model(name: str, device: torch.device, *, quick: bool) -> TransformerLM:
    """gpt2-small with one of `MODELS`, or a tiny model."""
    attention, sketch_size = MODELS[name]
    small = {"num_layers": 2, "vocab_size": 300} if quick else {}
    sizes = Sizes(sketch_size, 16 if quick else _LOCAL_CHUNK)
    with device:  # weights are drawn where they stay: on the CPU that takes longer than what is timed
        return models.build_model(attention, "tiny" if quick else "gpt2-small", sizes, **small)


def time_training(clock: Clock, rates: Rates, section: Budget, journal: Journal, *, quick: bool) -> None:
    """Steps of constant tokens, bfloat16 autocast and AdamW, at several contexts."""
    tokens, lengths = (128, [32, 64]) if quick else (_STEP_TOKENS, [2**15, 2**11, 2**13, 2**12, 2**14])
    points = [{"model": name, "batch": tokens // length, "length": length} for length in lengths for name in MODELS]

    def measure(labels: Labels) -> dict[str, Any]:
        return _train(clock, rates, quick, labels)

    model_cases("train", clock.device, section, journal).run(points, measure, describe)


def _train(clock: Clock, rates: Rates, quick: bool, labels: Labels) -> dict[str, Any]:
    model = build_model(labels["model"], clock.device, quick=quick)
    shape = (labels["batch"], labels["length"] + 1)
    ids = torch.randint(model.config.vocab_size, shape, device=clock.device)
    step = models.training_step(model, ids, lambda: torch.autocast(clock.device.type, dtype=torch.bfloat16))
    peak = peak_memory(clock.device, step)
    timing = clock.measure(step, limit_seconds=1.0)
    floor = floors.training_step(model, labels["batch"], labels["length"])
    rate = labels["batch"] * labels["length"] / timing.seconds
    counted = {"operations": floor.operations, "floor_seconds": floor.seconds(rates)}
    return {**vars(timing), "tokens_per_second": rate, "peak_bytes": peak, **counted}
