"""Figures with targets: what a run found, whether that is what it should be, and the picture of its times."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polysketch.benchmarking.plot import plot_time_per_token

NOT_FOUND_OUT = "not found out"
"""The reason where nobody knows one."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a figure should be, and why it is not, where it is missed.

    Attributes:
        at_least, at_most: bounds; both where the figure shall lie between two.
        why: for who reads that it is missed, from docs/performance.md; `NOT_FOUND_OUT` where that has no reason.

    Raises:
        ValueError: neither bound, or no reason.
    """

    at_least: float | None = None
    at_most: float | None = None
    why: str

    def __post_init__(self) -> None:
        if self.at_least is None and self.at_most is None:
            raise ValueError("expected a target with at_least or at_most, found neither")
        if not self.why.strip():
            raise ValueError("expected why the target is missed, where it is; found no reason")

    def is_reached(self, value: float) -> bool:
        """Whether a value lies within the bounds."""
        enough = self.at_least is None or self.at_least <= value
        return enough and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        bounds = [f">= {self.at_least:g}"] if self.at_least is not None else []
        bounds += [f"<= {self.at_most:g}"] if self.at_most is not None else []
        return " and ".join(bounds)


@dataclass(frozen=True)
class Figure:
    """One number, and what it should be.

    Attributes:
        name: what it is.
        value: measured.
        unit: "x" for ratios.
        target: None where there is none.
        note: the floor beside it, or how it was measured.
    """

    name: str
    value: float
    unit: str = "x"
    target: Target | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None without one."""
        return None if self.target is None else self.target.is_reached(self.value)

    @property
    def why(self) -> str | None:
        """The reason where the target is missed."""
        return self.target.why if self.target is not None and not self.reached else None

    @property
    def lines(self) -> list[str]:
        """For a table: with the target, and whether it is reached; then, where it is missed, why."""
        target = "" if self.target is None else f"{self.target} {'reached' if self.reached else 'MISSED'}"
        line = f"{self.name:<80} {self.value:9.3f} {self.unit:<8} {target:<26} {self.note}".rstrip()
        return [line] if self.why is None else [line, f"    why: {self.why}"]

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        bounds = {
            "at_least": self.target and self.target.at_least,
            "at_most": self.target and self.target.at_most,
        }
        found = {"name": self.name, "value": self.value, "unit": self.unit}
        return {**found, **bounds, "note": self.note, "reached": self.reached, "why": self.why}


@dataclass(frozen=True)
class Found:
    """What a section found.

    Attributes:
        figures: what it prints.
        measurements: that they are read from, as `polysketch.benchmarking` makes them; they are drawn.
        rows: other measurements, which are not.
        skipped: what was not measured, and why, a line each.
    """

    figures: list[Figure] = field(default_factory=list)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def draw(measurements: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Time per token against length into `path`; says where it is, or why there is none: no matplotlib, no times."""
    try:
        plot_time_per_token(measurements, title, path)
    except (ImportError, ValueError) as error:
        print(f"no picture: {error}")
    else:
        print(f"picture: {path}")
