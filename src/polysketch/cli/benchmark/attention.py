"""`polysketch benchmark attention`."""

from dataclasses import dataclass
from typing import Any

from polysketch.benchmarking import AttentionSettings, time_attention
from polysketch.cli.benchmark.common import CommonFlags, Row, megabytes, run_benchmark, time_columns

__all__ = ["AttentionFlags", "run"]


@dataclass(frozen=True, kw_only=True)
class AttentionFlags(CommonFlags, AttentionSettings):
    """Time attention alone at several lengths, against PyTorch's scaled_dot_product_attention.

    Every result is first compared with its definition in float64 at a small length; one that disagrees is not timed,
    and the exit status is 1. Time and memory of every mechanism of the library, in about ten minutes on two cores:

    polysketch benchmark attention --mechanisms all --heads 4 --lengths 1024 2048 4096 8192 16384 --memory
    --budget-seconds 10 --plot mechanisms.png --out mechanisms.json
    """

    def __post_init__(self) -> None:
        CommonFlags.__post_init__(self)
        AttentionSettings.__post_init__(self)


def run(flags: AttentionFlags) -> int:
    """Time as the flags say, print the table, and return the exit status."""
    return run_benchmark("attention", flags, AttentionSettings, time_attention, _row, _about)


def _about(settings: AttentionSettings) -> str:
    only_mechanisms = settings.mechanisms and settings.variants is None
    return (
        f"{settings.direction}, causal, batch {settings.batch}, {settings.heads} heads of {settings.head_dim}"
        + (", mechanisms with the options named, else their defaults" if settings.mechanisms else "")
        + ("" if only_mechanisms else f", sketch size {settings.sketch_size}, exact chunks of {settings.local}")
    )


def _row(one: dict[str, Any]) -> Row:
    named = {"length": f"{one['length']:,}", "": one["series"], "backend": one["backend"] or ""}
    return {**named, **time_columns(one, "sdpa"), "peak MB": megabytes(one["peak_bytes"])}
