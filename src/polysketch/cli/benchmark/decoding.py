"""`polysketch benchmark decoding`."""

from dataclasses import dataclass
from typing import Any

from polysketch.benchmarking import DecodingSettings, time_decoding
from polysketch.cli.benchmark.common import CommonFlags, Row, megabytes, run_benchmark, time_columns

__all__ = ["DecodingFlags", "run"]


@dataclass(frozen=True, kw_only=True)
class DecodingFlags(CommonFlags, DecodingSettings):
    """Time the generation of one token after the other at several positions, against the same model with softmax
    attention and its cache of keys and values.

    A round generates a whole local chunk, so that folding it into the state is included. The states are made without
    generating up to the position: from random tokens read at once, or, for a cache, filled with random numbers.

    Attention is first compared, generating, with its definition in float64; a model whose attention disagrees is not
    timed, and the exit status is 1.
    """

    def __post_init__(self) -> None:
        CommonFlags.__post_init__(self)
        DecodingSettings.__post_init__(self)


def run(flags: DecodingFlags) -> int:
    """Time as the flags say, print the table, and return the exit status."""
    return run_benchmark("decoding", flags, DecodingSettings, time_decoding, _row, _about)


def _about(settings: DecodingSettings) -> str:
    return (
        f"decoding with {settings.preset}, batch {settings.batch}, sketch size {settings.sketch_size}, exact chunks of "
        f"{settings.local}\n"
        "milliseconds: the median of a token; ratio and tokens/s: from the mean over a chunk, its folding included"
    )


def _row(one: dict[str, Any]) -> Row:
    named = {"position": f"{one['position']:,}", "attention": one["series"]}
    mean = {"mean ms": f"{one['mean_seconds'] * 1e3:,.3f}", "slowest ms": f"{one['slowest_seconds'] * 1e3:,.3f}"}
    return {**named, **time_columns(one, "softmax"), **mean, "state MB": megabytes(one["state_bytes"])}
