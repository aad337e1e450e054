"""`polysketch benchmark attention`, `training`, `decoding`, `pictures`: what is timed, and the columns of its table."""

from dataclasses import dataclass
from typing import Any

from polysketch.benchmarking import AttentionSettings, DecodingSettings, PicturesSettings, TrainingSettings
from polysketch.benchmarking.tables import Row, megabytes
from polysketch.cli.benchmark.common import CommonFlags, run_benchmark, time_columns

__all__ = [
    "AttentionFlags",
    "DecodingFlags",
    "PicturesFlags",
    "TrainingFlags",
    "run_attention",
    "run_decoding",
    "run_pictures",
    "run_training",
]


@dataclass(frozen=True, kw_only=True)
class AttentionFlags(CommonFlags, AttentionSettings):
    """Time attention alone at several lengths, against PyTorch's scaled_dot_product_attention.

    Every result is first compared with its definition in float64 at a small length; one that disagrees is not timed,
    and the exit status is 1. The last example is time and memory of every mechanism of the library, in about ten
    minutes on two cores.

    Examples:
      polysketch benchmark attention --lengths 1024 4096 16384 --backward
      polysketch benchmark attention --mechanisms all --heads 4 --memory \\
        --budget-seconds 10 --plot mechanisms.png --out mechanisms.json
    """


@dataclass(frozen=True, kw_only=True)
class TrainingFlags(CommonFlags, TrainingSettings):
    """Time one training step (forward, backward, clipping, AdamW) of a language model at several contexts, against the
    same model with softmax attention.

    The attention of every model is first compared with its definition, with gradients, in float64 at a small length; a
    model whose attention disagrees is not timed, and the exit status is 1.
    """


@dataclass(frozen=True, kw_only=True)
class DecodingFlags(CommonFlags, DecodingSettings):
    """Time the generation of one token after the other at several positions, against the same model with softmax
    attention and its cache of keys and values.

    A round generates a whole local chunk, so that folding it into the state is included; models and positions take
    turns. The states are made without generating up to the position: caches and sums are filled with random numbers,
    others come from random tokens read at once.

    Attention is first compared, generating, with its definition in float64; a model whose attention disagrees is not
    timed, and the exit status is 1.
    """


@dataclass(frozen=True, kw_only=True)
class PicturesFlags(CommonFlags, PicturesSettings):
    """Time a vision transformer forward, against the same model with softmax attention.

    The attention of every model is first compared with its definition in float64 at a small length; a model whose
    attention disagrees is not timed, and the exit status is 1. The example has 4,096 patches, and takes a minute or
    two on two cores.

    Examples:
      polysketch benchmark pictures --image-sizes 256 --patch 4 --out pictures.json
    """


def run_attention(flags: AttentionFlags) -> int:
    """Time as the flags say, print the table, and return the exit status."""

    def row(one: dict[str, Any]) -> Row:
        named = {"length": f"{one['length']:,}", "": one["series"], "backend": one["backend"] or ""}
        return {**named, **time_columns(one, "sdpa"), "peak MB": megabytes(one["peak_bytes"])}

    return run_benchmark("attention", flags, AttentionSettings, row)


def run_training(flags: TrainingFlags) -> int:
    """Time as the flags say, print the table, and return the exit status."""

    def row(one: dict[str, Any]) -> Row:
        named = {"context": f"{one['length']:,}", "attention": one["series"]}
        return {**named, **time_columns(one, "softmax"), "peak MB": megabytes(one["peak_bytes"])}

    return run_benchmark("training", flags, TrainingSettings, row)


def run_decoding(flags: DecodingFlags) -> int:
    """Time as the flags say, print the table, and return the exit status."""

    def row(one: dict[str, Any]) -> Row:
        named = {"after": f"{one['position']:,}", "attention": one["series"]}
        mean = {"mean ms": f"{one['mean_seconds'] * 1e3:,.2f}", "worst ms": f"{one['slowest_seconds'] * 1e3:,.2f}"}
        return {**named, **time_columns(one, "softmax"), **mean, "state MB": megabytes(one["state_bytes"])}

    note = (
        "ms: the median of a token after so many; speedup and tokens/s: from the mean of a chunk, its folding included"
    )
    return run_benchmark("decoding", flags, DecodingSettings, row, note=note)


def run_pictures(flags: PicturesFlags) -> int:
    """Time as the flags say, print the table, and return the exit status."""

    def row(one: dict[str, Any]) -> Row:
        return {"patches": f"{one['length']:,}", "attention": one["series"], **time_columns(one, "softmax")}

    return run_benchmark("pictures", flags, PicturesSettings, row)
