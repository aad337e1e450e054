"""Sizes of a CPU run, and what a section is given and gives."""

import sys
from dataclasses import dataclass, field
from typing import Any

from benchmarks.timing import Clock, Rates


@dataclass(frozen=True)
class Settings:
    """Sizes; the defaults are those of the stated figures.

    Attributes:
        heads, sketch_size, local: of attention; heads are 64 wide.
        forward_lengths, backward_lengths: tokens, each the double of the one before.
        repeats: timed rounds of A B A B.
        memory_length: tokens of the memory measurements.
        positions: where generation is timed; each time over the whole local chunk that holds the position.
        decode_rounds: how often that chunk is generated.
        preset: of the model that generates, and its changes.
        training_preset: of the model whose training step is measured.
        rate_size: side of the matrices whose product gives the machine's rate.
    """

    heads: int = 12
    sketch_size: int = 32
    local: int = 256
    forward_lengths: tuple[int, ...] = (2_048, 4_096, 8_192, 16_384, 32_768)
    backward_lengths: tuple[int, ...] = (4_096, 8_192, 16_384)
    repeats: int = 3
    memory_length: int = 32_768
    positions: tuple[int, int] = (1_000, 32_000)
    decode_rounds: int = 3
    preset: str = "mini"
    preset_changes: dict[str, Any] = field(default_factory=lambda: {"hidden_size": 768, "num_heads": 12})
    training_preset: str = "mini"
    rate_size: int = 2_048


FULL = Settings()
QUICK = Settings(
    heads=2,
    local=64,
    forward_lengths=(256, 512),
    backward_lengths=(256,),
    repeats=1,
    memory_length=256,
    positions=(40, 200),
    decode_rounds=1,
    preset="tiny",
    preset_changes={"num_layers": 1},
    training_preset="tiny",
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


@dataclass(frozen=True)
class Bench:
    """What every section is given."""

    settings: Settings
    clock: Clock
    rates: Rates

    def progress(self, text: str) -> None:
        """Say on stderr what was just done."""
        print(f"  {text}", file=sys.stderr, flush=True)
