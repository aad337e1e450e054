"""Sections of `python -m benchmarks`: what is timed on a CPU by `polysketch.benchmarking`, and the targets.

Attention, training steps, decoding, memory, and generation early and late in a context.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.figures import Figure, Outcome
from polysketch.benchmarking import (
    AttentionSettings,
    DecodingSettings,
    TrainingSettings,
    Workbench,
    calls,
    memory,
    time_attention,
    time_decoding,
    time_training,
)
from polysketch.benchmarking.models import build_model, decoding_floor, state_at
from polysketch.benchmarking.timing import ratio
from polysketch.benchmarking.token_steps import Decoder, time_rounds
from polysketch.benchmarking.ways import way

Settings = AttentionSettings | TrainingSettings | DecodingSettings

_GIGABYTE = 1e9
_EXACT_TOO = ("given", "learned", "random", "polynomial")  # where exact polynomial attention does not take minutes


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        compared: section -> what is timed against the baseline; the last two lengths of `forward` are doubled.
        memory: of the attention whose memory is measured.
        memory_step: of the training step whose memory is measured, at its one context.
        generation: where generation is timed; each time over the whole local chunk that holds the position.
        changes: of the preset of the model that generates there.
        repeats: timed rounds of A B A B.
        rate_size: side of the matrices whose product gives the machine's rate.
    """

    compared: dict[str, tuple[Settings, ...]]
    memory: AttentionSettings
    memory_step: TrainingSettings
    generation: DecodingSettings
    changes: dict[str, Any]
    repeats: int
    rate_size: int


FULL = Scale(
    compared={
        "forward": (
            AttentionSettings(lengths=(1_024, 2_048, 4_096, 8_192), variants=_EXACT_TOO),
            AttentionSettings(lengths=(16_384, 32_768)),
        ),
        "backward": (
            AttentionSettings(lengths=(4_096, 8_192), variants=_EXACT_TOO, backward=True),
            AttentionSettings(lengths=(16_384,), backward=True),
        ),
        "training": (TrainingSettings(),),
        "decoding": (DecodingSettings(preset="tiny"), DecodingSettings(preset="mini")),
    },
    memory=AttentionSettings(lengths=(32_768,)),
    memory_step=TrainingSettings(contexts=(32_768,)),
    generation=DecodingSettings(preset="mini", positions=(1_000, 32_000)),
    changes={"hidden_size": 768, "num_heads": 12},
    repeats=3,
    rate_size=2_048,
)
_TINY: dict[str, Any] = {"heads": 2, "local": 64}
QUICK = Scale(
    compared={
        "forward": (
            AttentionSettings(lengths=(256,), variants=_EXACT_TOO, **_TINY),
            AttentionSettings(lengths=(512, 1_024), **_TINY),
        ),
        "backward": (AttentionSettings(lengths=(256,), variants=_EXACT_TOO, backward=True, **_TINY),),
        "training": (TrainingSettings(preset="tiny", contexts=(128,), local=64),),
        "decoding": (DecodingSettings(preset="tiny", positions=(128,), local=64),),
    },
    memory=AttentionSettings(lengths=(256,), **_TINY),
    memory_step=TrainingSettings(preset="tiny", contexts=(256,), local=64),
    generation=DecodingSettings(preset="tiny", positions=(40, 200), local=64),
    changes={"num_layers": 1},
    repeats=1,
    rate_size=256,
)

AT_LEAST = {
    ("forward", "features given"): {2_048: 1.0, 16_384: 7.0, 32_768: 14.0},
    ("forward", "learned sketch"): {16_384: 2.3, 32_768: 4.5},
    ("forward+backward", "features given"): {8_192: 3.5, 16_384: 7.0},
    ("training step of mini", "learned"): {8_192: 1.2, 16_384: 1.8},
    ("training step of mini", "random"): {8_192: 2.0, 16_384: 3.5},
    ("decoding with tiny", "learned"): {8_192: 1.0, 32_768: 3.0},
    ("decoding with mini", "learned"): {8_192: 1.0, 32_768: 3.0},
}
"""Direction and series -> length or position -> times as fast as the baseline, at least."""

AT_MOST_GIGABYTES = {("given", False): 0.1, ("given", True): 0.5, ("learned", False): 1.0, ("learned", True): 1.0}
"""Way and whether with gradients -> memory beyond inputs, outputs and gradients at 32,768 tokens."""

_MOST_STEP_GIGABYTES = 8.0
_MOST_FOR_DOUBLING = 2.2
_WITHIN, _MOST_FOLD = 0.10, 5.0


@dataclass(frozen=True, kw_only=True)
class Bench(Workbench):
    """What every section is given: the machine, and the sizes of this run."""

    scale: Scale


def compared(bench: Bench, section: str) -> Outcome:
    """All measurements of a section, and a figure for each that is not of the baseline, which comes first."""
    outcome = Outcome()
    for settings in bench.scale.compared[section]:
        time, what = _TIMED[type(settings)]
        measurements = time(bench, settings)
        others = [one for one in measurements if one["series"] != measurements[0]["series"]]
        outcome.measurements += measurements
        outcome.figures += [_figure(one, what) for one in others]
    return outcome


_TIMED: dict[type, tuple[Callable[[Workbench, Any], list[dict[str, Any]]], str]] = {
    AttentionSettings: (time_attention, "times as fast as SDPA"),
    TrainingSettings: (time_training, "times as fast as softmax"),
    DecodingSettings: (time_decoding, "tokens per second over softmax"),  # folding of a chunk included
}


def forward(bench: Bench) -> Outcome:
    """Ratios to SDPA at every length, and what the last doubling costs."""
    outcome = compared(bench, "forward")
    outcome.figures += [_doubling(bench, name) for name in ("given", "learned")]
    return outcome


def _figure(one: dict[str, Any], compared: str) -> Figure:
    place = one.get("length") or one["position"]
    target = AT_LEAST.get((one["direction"], one["series"]), {}).get(place)
    note = f"{one['seconds']:.3g} s, floor {one['floor_seconds']:.3g} s, {one['tokens_per_second']:,.0f} tokens/s"
    title = f"{one['direction']} at {place:,}, {one['series']}: {compared}"
    return Figure(title, one["ratio"], at_least=target, note=note)


def _doubling(bench: Bench, name: str) -> Figure:
    """The time at the last length over that at half of it, alternating."""
    settings: Any = bench.scale.compared["forward"][-1]
    half, length = settings.lengths[-2:]
    one = way(name, settings.sizes)
    torch.manual_seed(0)
    shapes = [settings.shape(size) for size in (half, length)]
    made = [calls.forward(one.prepare(shape, bench.device, bench.dtype)) for shape in shapes]
    functions = {str(shape.length): call for shape, call in zip(shapes, made, strict=True)}
    progress = bench.saying(f"doubling, {one.title}")
    seconds = bench.clock.alternate(functions, repeats=bench.repeats, progress=progress)
    cost, title = ratio(seconds[str(length)], seconds[str(half)]), f"time at {length:,} over time at {half:,}"
    return Figure(f"forward, {one.title}: {title}", cost, at_most=_MOST_FOR_DOUBLING, note="2 is linear, 4 quadratic")


def attention_memory(bench: Bench) -> Outcome:
    """Forward and training memory of attention; see `polysketch.benchmarking.memory` for the method."""
    outcome, settings = Outcome(), bench.scale.memory
    shape = settings.shape(settings.lengths[0])
    for name in ("sdpa", "given", "learned"):
        for gradients in (False, True):
            found = memory.attention(bench, name, [shape], settings.sizes, backward=gradients)[0]
            case = {"case": way(name, settings.sizes).title, "backward": gradients, "length": shape.length}
            outcome.measurements.append({**case, "beyond_bytes": found})
            title = f"memory at {shape.length:,}, {case['case']}, {'training' if gradients else 'forward'}"
            bench.progress(f"{title}: {found / _GIGABYTE:.3f} GB")
            target = AT_MOST_GIGABYTES.get((name, gradients))
            note = "beyond inputs, outputs and gradients"
            outcome.figures.append(Figure(title, found / _GIGABYTE, "GB", at_most=target, note=note))
    return outcome


def training_memory(bench: Bench) -> Outcome:
    """Peak memory of the whole process that makes one training step at a long context."""
    asked = bench.scale.memory_step
    found = memory.training(asked, "learned", asked.contexts[0], bench.dtype)
    title = f"training step of {asked.preset} at {asked.contexts[0]:,}: peak of the process"
    note = f"{found['beyond_bytes'] / _GIGABYTE:.2f} GB of it beyond Python and PyTorch"
    figure = Figure(title, found["peak_bytes"] / _GIGABYTE, "GB", at_most=_MOST_STEP_GIGABYTES, note=note)
    return Outcome([figure], [{"case": f"training step of {asked.preset}", "length": asked.contexts[0], **found}])


@torch.inference_mode()
def generation(bench: Bench) -> Outcome:
    """Time per token over a whole local chunk, late over early in a context, the two taking turns token by token."""
    asked = bench.scale.generation
    model = build_model("learned", asked.preset, asked.sizes, **bench.scale.changes).eval()
    token = torch.zeros(1, 1, dtype=torch.int64)
    states = [state_at(model, 1, asked.start(position)) for position in asked.positions]
    decoders = {when: Decoder(model, state, token) for when, state in zip(("early", "late"), states, strict=True)}
    time_rounds(bench, decoders, asked.local, warm_up=asked.local, what="generation", turn=1)
    early, late = map(_place, asked.positions, decoders.values())
    floor = decoding_floor(model, decoders["late"].state).seconds(bench.rates)
    return Outcome(_generation_figures(early, late, floor), [early, late])


def _place(position: int, decoder: Decoder) -> dict[str, Any]:
    """Of every round the median counts: one hiccup of the machine is not the code's."""
    return {
        "position": position,
        "median_seconds": statistics.median(decoder.seconds),
        "percentile_99_seconds": statistics.median(map(_percentile_99, decoder.rounds)),
        "fold_seconds": statistics.median(seconds[-1] for seconds in decoder.rounds),  # of the chunk into the sums
        "state_bytes": decoder.state.nbytes,
        "seconds": decoder.rounds,
    }


def _percentile_99(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]


def _generation_figures(early: dict[str, Any], late: dict[str, Any], floor: float) -> list[Figure]:
    where = f"at {late['position']:,} over {early['position']:,}"
    within: dict[str, Any] = {"at_least": 1 - _WITHIN, "at_most": 1 + _WITHIN}
    compared = ("median_seconds", "percentile_99_seconds", "state_bytes")
    median, tail, size = (late[name] / early[name] for name in compared)
    note = f"{late['median_seconds'] * 1e3:.3g} ms a token, floor {floor * 1e3:.3g} ms"
    slow, fold = f"{late['percentile_99_seconds'] * 1e3:.3g} ms", "generation, folding a chunk over the median"
    late_fold, early_fold = (place["fold_seconds"] / place["median_seconds"] for place in (late, early))
    return [
        Figure(f"generation, median {where}", median, note=note, **within),
        Figure(f"generation, 99th percentile {where}", tail, note=slow, **within),
        Figure(fold, late_fold, at_most=_MOST_FOLD, note="late"),
        Figure(fold, early_fold, at_most=_MOST_FOLD, note="early"),
        Figure(f"generation, state bytes {where}", size, at_least=1, at_most=1, note=f"{late['state_bytes']:,}"),
    ]


SECTIONS: dict[str, Callable[[Bench], Outcome]] = {
    "forward": forward,
    **{name: partial(compared, section=name) for name in ("backward", "training", "decoding")},
    "memory": attention_memory,
    "training-memory": training_memory,
    "generation": generation,
}
"""In the order in which they are run."""
