"""Sizes of a CPU run, and what a section is given and gives."""

import sys
from dataclasses import dataclass, field
from typing import Any

from polysketch.benchmarking.workbench import Workbench


@dataclass(frozen=True)
class Settings:
    """Sizes; the defaults are those of the stated figures.

    Attributes:
        heads, sketch_size, local: of attention; heads are 64 wide.
        forward_lengths, backward_lengths: tokens, each the double of the one before.
        exact_lengths: those at which exact polynomial attention is timed too; beyond, it takes minutes.
        repeats: timed rounds of A B A B.
        memory_length: tokens of the memory measurements.
        training_preset, training_contexts, training_repeats: of the model whose training step is timed.
        decoding_presets, decoding_positions, decode_rounds: of the models that are compared when generating.
        positions: where generation is timed; each time over the whole local chunk that holds the position.
        preset, preset_changes: of the model that generates there.
        rate_size: side of the matrices whose product gives the machine's rate.
    """

    heads: int = 12
    sketch_size: int = 32
    local: int = 256
    forward_lengths: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
    backward_lengths: tuple[int, ...] = (4_096, 8_192, 16_384)
    exact_lengths: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192)
    repeats: int = 3
    memory_length: int = 32_768
    training_preset: str = "mini"
    training_contexts: tuple[int, ...] = (8_192, 16_384)
    training_repeats: int = 3
    decoding_presets: tuple[str, ...] = ("tiny", "mini")
    decoding_positions: tuple[int, ...] = (8_192, 32_768)
    decode_rounds: int = 3
    positions: tuple[int, int] = (1_000, 32_000)
    preset: str = "mini"
    preset_changes: dict[str, Any] = field(default_factory=lambda: {"hidden_size": 768, "num_heads": 12})
    rate_size: int = 2_048


FULL = Settings()
QUICK = Settings(
    heads=2,
    local=64,
    forward_lengths=(256, 512),
    backward_lengths=(256,),
    exact_lengths=(256,),
    repeats=1,
    memory_length=256,
    training_preset="tiny",
    training_contexts=(128,),
    training_repeats=1,
    decoding_presets=("tiny",),
    decoding_positions=(128,),
    decode_rounds=1,
    positions=(40, 200),
    preset="tiny",
    preset_changes={"num_layers": 1},
    rate_size=256,
)


@dataclass(frozen=True)
class Figure:
    """One number, and what it should be.

    Attributes:
        name: what it is.
        value: measured.
        unit: "x" for ratios.
        at_least, at_most: the target; None where there is none.
        note: the floor beside it, or how it was measured.
    """

    name: str
    value: float
    unit: str = "x"
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.at_least is None and self.at_most is None:
            return None
        low = -float("inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return low <= self.value <= high


@dataclass
class Outcome:
    """What a section found: figures with targets, and the measurements they come from (JSON values)."""

    figures: list[Figure] = field(default_factory=list)
    measurements: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Bench(Workbench):
    """What every section is given: the machine, and the sizes of this run."""

    settings: Settings


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"  {text}", file=sys.stderr, flush=True)


def floor_note(measurement: dict[str, Any]) -> str:
    """A time beside its floor."""
    return f"{measurement['seconds']:.3g} s, floor {measurement['floor_seconds']:.3g} s"
