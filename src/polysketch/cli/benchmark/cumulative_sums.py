"""`polysketch benchmark cumulative-sums`."""

from dataclasses import dataclass
from typing import Any

from polysketch.benchmarking import CumulativeSumsSettings, time_cumulative_sums
from polysketch.benchmarking.cumulative_sums import DESCRIPTION
from polysketch.cli.benchmark.common import CommonFlags, Row, run_benchmark, time_columns

__all__ = ["CumulativeSumsFlags", "run"]


@dataclass(frozen=True, kw_only=True)
class CumulativeSumsFlags(CommonFlags, CumulativeSumsSettings):
    """Time causal linear attention summed chunk by chunk against the same summed token by token, forward: the ablation
    of PolySketchFormer's lower-triangular multiplication (section 3.1).
    """

    def __post_init__(self) -> None:
        CommonFlags.__post_init__(self)
        CumulativeSumsSettings.__post_init__(self)


def run(flags: CumulativeSumsFlags) -> int:
    """Time as the flags say, print the table, and return the exit status."""
    return run_benchmark("cumulative-sums", flags, CumulativeSumsSettings, time_cumulative_sums, _row, _about)


def _about(settings: CumulativeSumsSettings) -> str:
    return (
        f"forward, causal, power 1, {settings.features:,} features, batch {settings.batch}, {settings.heads} heads of "
        f"{settings.head_dim}\n{DESCRIPTION}"
    )


def _row(one: dict[str, Any]) -> Row:
    named = {"length": f"{one['length']:,}", "sums": one["series"]}
    unfit = {"all states at once, GB": f"{one['all_states_bytes'] / 1e9:,.1f}"}
    return {**named, **time_columns(one, "token by token"), **unfit}
