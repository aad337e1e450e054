"""Training steps and generation of a language model against the same model with softmax attention."""

from dataclasses import replace
from typing import Any

from benchmarks.cpu.settings import Bench, Figure, Outcome, floor_note
from polysketch.benchmarking import DecodingSettings, TrainingSettings, time_decoding, time_training
from polysketch.benchmarking.models import BASELINE

_TRAINING_TARGETS = {
    ("learned", 8_192): 1.2,
    ("learned", 16_384): 1.8,
    ("random", 8_192): 2.0,
    ("random", 16_384): 3.5,
}
_DECODING_TARGETS = {8_192: 1.0, 32_768: 3.0}


def training(bench: Bench) -> Outcome:
    """Seconds of a training step, learned and random sketches, over those of softmax."""
    settings = bench.settings
    asked = TrainingSettings(
        preset=settings.training_preset,
        contexts=settings.training_contexts,
        sketch_size=settings.sketch_size,
        local=settings.local,
    )
    measurements = time_training(replace(bench, repeats=settings.training_repeats), asked)
    return Outcome([_training_figure(one) for one in measurements if one["series"] != BASELINE], measurements)


def _training_figure(one: dict[str, Any]) -> Figure:
    title = f"{one['direction']} at {one['length']:,}, {one['series']}: times as fast as softmax"
    target = _TRAINING_TARGETS.get((one["series"], one["length"]))
    note = f"{floor_note(one)}, {one['tokens_per_second']:,.0f} tokens/s"
    return Figure(title, one["ratio"], at_least=target, note=note)


def decoding(bench: Bench) -> Outcome:
    """Tokens per second, folding of a chunk included, over those of softmax with its cache of keys and values."""
    settings, outcome = bench.settings, Outcome()
    for preset in settings.decoding_presets:
        asked = DecodingSettings(
            preset=preset,
            positions=settings.decoding_positions,
            sketch_size=settings.sketch_size,
            local=settings.local,
        )
        measurements = time_decoding(replace(bench, repeats=settings.decode_rounds), asked)
        outcome.measurements += measurements
        outcome.figures += [_decoding_figure(one) for one in measurements if one["series"] != BASELINE]
    return outcome


def _decoding_figure(one: dict[str, Any]) -> Figure:
    title = f"{one['direction']} at {one['position']:,}, {one['series']}: tokens per second over softmax"
    note = f"{one['mean_seconds'] * 1e3:.3g} ms a token, floor {one['floor_seconds'] * 1e3:.3g} ms"
    return Figure(title, one["ratio"], at_least=_DECODING_TARGETS.get(one["position"]), note=note)
