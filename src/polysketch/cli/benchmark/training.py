"""`polysketch benchmark training`."""

from dataclasses import dataclass
from typing import Any

from polysketch.benchmarking import TrainingSettings, time_training
from polysketch.cli.benchmark.common import CommonFlags, Row, megabytes, run_benchmark, time_columns

__all__ = ["TrainingFlags", "run"]


@dataclass(frozen=True, kw_only=True)
class TrainingFlags(CommonFlags, TrainingSettings):
    """Time one training step (forward, backward, clipping, AdamW) of a language model at several contexts, against the
    same model with softmax attention.

    The attention of every model is first compared with its definition, with gradients, in float64 at a small length; a
    model whose attention disagrees is not timed, and the exit status is 1.
    """

    def __post_init__(self) -> None:
        CommonFlags.__post_init__(self)
        TrainingSettings.__post_init__(self)


def run(flags: TrainingFlags) -> int:
    """Time as the flags say, print the table, and return the exit status."""
    return run_benchmark("training", flags, TrainingSettings, time_training, _row, _about)


def _about(settings: TrainingSettings) -> str:
    return (
        f"training step of {settings.preset}, batch {settings.batch}, sketch size {settings.sketch_size}, exact chunks "
        f"of {settings.local}"
    )


def _row(one: dict[str, Any]) -> Row:
    named = {"context": f"{one['length']:,}", "attention": one["series"]}
    return {**named, **time_columns(one, "softmax"), "peak MB": megabytes(one["peak_bytes"])}
