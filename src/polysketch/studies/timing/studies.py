"""The studies of time. Sizes: `smoke` is seconds, `cpu` quiet cores, `gpu` one GPU for half an hour."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from polysketch.benchmarking import AttentionSettings, TrainingSettings, floors, time_attention, time_training
from polysketch.benchmarking.calls import forward, forward_backward, linear, sdpa
from polysketch.benchmarking.floors import Shape
from polysketch.benchmarking.hyper_calls import check_hyper
from polysketch.benchmarking.hyper_speed import time_shape
from polysketch.benchmarking.settings import check_positive
from polysketch.benchmarking.workbench import Workbench
from polysketch.studies.rows import parsed
from polysketch.studies.task_study import nearby_options
from polysketch.studies.timing.study import TimeSettings, TimeStudy, at_the_longest, best_in_between, faster_than
from polysketch.studies.timing.sums import TOKENS, SumsSettings, time_sums

BLOCK_SUMS = TimeStudy(
    claim="Causal sums are faster by blocks than token by token.",
    paper="table 4, 8k: Performer with 2,048 features by blocks 1.33 steps/s, with 256 token by token 0.21",
    rows=("chunks",),
    sizes={
        "smoke": SumsSettings(lengths=(64,), features=32, heads=2, repeats=1),
        "cpu": SumsSettings(lengths=(4_096, 8_192, 16_384)),
        "gpu": SumsSettings(lengths=(4_096, 8_192, 16_384, 32_768)),
    },
    timed=time_sums,
    baseline=TOKENS,
    judge=at_the_longest({"chunks": 1.0}),
    needs=("chunks",),
    parts=("chunks",),
)


@dataclass(frozen=True, kw_only=True)
class HeadSettings(TimeSettings):
    """Sizes of attention alone.

    Attributes:
        heads, head_dim: of queries, keys and values.
        batch: sequences at once.
        nearby: tokens of chunks, windows and samples, for mechanisms that have them; 0 for their defaults.
        backward: time the gradients of all inputs too.
    """

    heads: int = 4
    head_dim: int = 64
    batch: int = 1
    nearby: int = 0
    backward: bool = False

    def __post_init__(self) -> None:
        check_positive(heads=self.heads, head_dim=self.head_dim, batch=self.batch)
        super().__post_init__()

    def shape(self, length: int) -> Shape:
        """The shape at a length."""
        return Shape(self.batch, length, self.heads, self.head_dim)


def _as_way(row: str) -> str:
    """The row as `polysketch benchmark` calls it."""
    name, *options = row.split("+")
    return f"{name}:{','.join(options)}" if options else name


def _renamed(found: list[dict[str, Any]], row: str) -> list[dict[str, Any]]:
    return [{**one, "series": row if one["series"] == _as_way(row) else one["series"]} for one in found]


def time_mechanism(bench: Workbench, row: str, settings: HeadSettings, length: int) -> list[dict[str, Any]]:
    """A mechanism, or sums by blocks with nothing exact (`sums+compute_chunk=128`), against SDPA, causal.

    Raises:
        ValueError: a result that disagrees with the reference.
    """
    if parsed(row)[0] == "sums":
        return _time_sums_alone(bench, row, settings, length)
    asked = AttentionSettings(
        lengths=(length,),
        mechanisms=(_as_way(row),),
        heads=settings.heads,
        head_dim=settings.head_dim,
        batch=settings.batch,
        backward=settings.backward,
        local=32,
    )
    return _renamed(time_attention(bench, asked), row)


def _time_sums_alone(bench: Workbench, row: str, settings: HeadSettings, length: int) -> list[dict[str, Any]]:
    """The op over features that are given."""
    torch.manual_seed(0)
    shape, options = settings.shape(length), parsed(row)[1]
    calls = {
        "sdpa": sdpa(shape, bench.device, bench.dtype),
        row: linear(shape, bench.device, bench.dtype, features=32, **options),
    }
    floor = floors.linear_attention(shape, 32, 1, backward=settings.backward, itemsize=bench.dtype.itemsize)
    prepare, direction = (forward_backward, "forward+backward") if settings.backward else (forward, "forward")
    say = bench.saying(f"{direction} at {length:,}")
    seconds = bench.clock.alternate(
        {name: prepare(call) for name, call in calls.items()}, repeats=bench.repeats, progress=say
    )
    return [
        {
            "direction": direction,
            "length": length,
            "series": name,
            **bench.measurement(seconds, name, "sdpa", shape.tokens, floor if name == row else None),
        }
        for name in calls
    ]


_BLOCKS = (64, 128, 256, 512, 1_024)
_LOCAL_BLOCKS = tuple(f"polysketch-paper+local_chunk={block}" for block in _BLOCKS)

BLOCK_SIZE = TimeStudy(
    claim="Blocks that are too small or too large cost time.",
    paper="version 1 takes 256, version 2 1,024",
    rows=(*_LOCAL_BLOCKS, *(f"sums+compute_chunk={block}" for block in _BLOCKS)),
    sizes={
        "smoke": HeadSettings(lengths=(64,), heads=1, repeats=1),
        "cpu": HeadSettings(lengths=(2_048, 4_096, 8_192, 16_384)),
        "gpu": HeadSettings(lengths=(4_096, 8_192, 16_384, 32_768), heads=12, batch=4, backward=True),
    },
    timed=time_mechanism,
    baseline="sdpa",
    judge=best_in_between("polysketch-paper"),
    needs=_LOCAL_BLOCKS,
    parts=("polysketch-paper", "sums"),
)


def time_hyper(bench: Workbench, row: str, settings: HeadSettings, length: int) -> list[dict[str, Any]]:
    """HyperAttention, `causal` or `bidirectional`, against SDPA, forward and, where it is asked for, with backward.

    Returns:
        Measurements, and in those of the row `error`, |found - exact| / |exact| of the output.

    Raises:
        ValueError: a result that disagrees with its definition.
    """
    name, options = parsed(row)
    options = {**nearby_options("hyper", settings.nearby), **options}
    shape = replace(settings.shape(length), causal=name == "causal")
    check_hyper(bench, shape, options, backward=settings.backward)
    return time_shape(bench, shape, options, backward=settings.backward, series=row, progress=bench.progress)


HYPER_SPEED = TimeStudy(
    claim="At the longest sequences HyperAttention is faster than exact attention, causal or not.",
    paper="131k tokens, 12 heads of 64: 54 times, causal 5.4 times",
    rows=("causal", "bidirectional"),
    sizes={
        "smoke": HeadSettings(lengths=(64,), heads=1, nearby=8, repeats=1, backward=True),
        "cpu": HeadSettings(lengths=(4_096, 8_192, 16_384, 32_768), backward=True, repeats=2),
        "long": HeadSettings(lengths=(65_536, 131_072), heads=1, backward=True, repeats=1),
        "gpu": HeadSettings(lengths=(4_096, 8_192, 16_384, 32_768, 65_536, 131_072), heads=12, backward=True),
    },
    timed=time_hyper,
    baseline="sdpa",
    judge=at_the_longest({"causal": 1.0, "bidirectional": 1.0}),
    needs=("causal", "bidirectional"),
    parts=("causal", "bidirectional"),
)

_LLOPS, _BASED = "llops+degree=2+num_features=256", "based+feature_dim=16"

KERNEL_SPEED = TimeStudy(
    claim="LLOPS with 256 features is faster than BASED with 273, at every length.",
    paper="figure 2: 1,000 to 10,000 tokens, heads of 128, p = 2",
    rows=(
        *(f"llops+degree=2+num_features={features}" for features in (64, 128, 256, 512)),
        _BASED,
        "performer+num_features=256",
        "linear",
    ),
    sizes={
        "smoke": HeadSettings(lengths=(64,), heads=1, head_dim=16, repeats=1),
        "cpu": HeadSettings(lengths=(1_000, 2_000, 5_000, 10_000), head_dim=128, repeats=5),
        "gpu": HeadSettings(lengths=(1_000, 2_000, 5_000, 10_000), head_dim=128, heads=16, repeats=20),
    },
    timed=time_mechanism,
    baseline="sdpa",
    judge=faster_than(_LLOPS, _BASED),
    needs=(_LLOPS, _BASED),
)


@dataclass(frozen=True, kw_only=True)
class StepSettings(TimeSettings):
    """Sizes of training steps.

    Attributes:
        preset: of the model.
        layers: of the model; the preset's when None.
        tokens: of a step, whatever the context.
    """

    preset: str = "mini"
    layers: int | None = None
    tokens: int = 8_192

    def __post_init__(self) -> None:
        check_positive(tokens=self.tokens, layers=1 if self.layers is None else self.layers)
        super().__post_init__()


def time_steps(bench: Workbench, row: str, settings: StepSettings, length: int) -> list[dict[str, Any]]:
    """Training steps of a model with the row's mechanism against those of the same model with softmax attention.

    Raises:
        ValueError: attention that disagrees with the reference.
    """
    asked = TrainingSettings(
        preset=settings.preset,
        layers=settings.layers,
        models=(_as_way(row),),
        contexts=(length,),
        batch=max(1, settings.tokens // length),
        local=32,
    )
    return _renamed(time_training(bench, asked), row)


TRAINING_SPEED = TimeStudy(
    claim="At the longest context a model trains faster with polysketch attention than with softmax.",
    paper="table 4, 32k, 1M tokens a step: learned and local, r = 32 1.98 steps/s, FlashAttention 1.03",
    rows=(
        "polysketch-paper",
        "polysketch-paper+sketch_size=64",
        "polysketch-paper+learned=False",
        "polysketch-paper+learned=False+sketch_size=64",
        "polysketch-paper+local_chunk=None",
        "polynomial",
        "performer+num_features=2048",
        "polysketch",
    ),
    sizes={
        "smoke": StepSettings(lengths=(64,), preset="tiny", tokens=128, repeats=1),
        "cpu": StepSettings(lengths=(1_024, 4_096, 16_384), tokens=16_384),
        "gpu": StepSettings(lengths=(512, 2_048, 8_192, 32_768), preset="gpt2-small", tokens=65_536),
        "paper": StepSettings(
            lengths=(512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768), preset="gpt2-small", tokens=2**20
        ),
        # Section 5 of version 1: 1.54 steps a second, FlashAttention 0.34, on 32 devices with, here, a row on each.
        "paper-version-1": StepSettings(lengths=(32_768,), preset="gpt2-small", layers=4, tokens=2**20),
    },
    timed=time_steps,
    baseline="softmax",
    judge=at_the_longest({"polysketch-paper": 1.0}),
    needs=("polysketch-paper",),
)
