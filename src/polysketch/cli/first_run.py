"""A run whose size is not given is a first one, of minutes; it says so, and what a longer one takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polysketch.progress import format_seconds

if TYPE_CHECKING:
    from polysketch.training import TrainingConfig

__all__ = ["SIZES", "is_first_run", "longer_run", "opening", "sizes_where_none_are_given"]

SIZES = {"steps": 650, "context": 512, "batch_size": 4}
"""1.3 million tokens: with preset tiny, about five minutes on two cores."""

_SAY_HOW_LONG = ("--steps", "--context", "--batch-size", "--max-minutes")
_TIMES_LONGER = 10


def sizes_where_none_are_given(arguments: Sequence[str]) -> dict[str, Any]:
    """The sizes of a new run by its command line: those of a first run where nothing says how long it should take.

    A run of a task has the task's rows, and keeps the defaults.
    """
    from polysketch.cli.run_defaults import value_of
    from polysketch.tasks import is_task

    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")}
    data = value_of("--data", arguments)
    return {} if given & set(_SAY_HOW_LONG) or (data and is_task(data)) else dict(SIZES)


def is_first_run(config: TrainingConfig) -> bool:
    """Whether a run has the sizes of a first one and begins now."""
    begins = not (config.out / "config.json").exists()
    return begins and all(getattr(config, name) == size for name, size in SIZES.items())


def opening(config: TrainingConfig) -> str:
    """What a first run says of itself at its start."""
    length = "about five minutes on two cores" if config.preset == "tiny" else "longer than with --preset tiny"
    return (
        f"a first run, {length}: {config.steps} steps of {config.batch_size} rows of {config.context} tokens; "
        "--steps, --context or --batch-size make it another"
    )


def longer_run(config: TrainingConfig, seconds: float) -> str:
    """What a longer one takes, by the time that this one took."""
    steps = _TIMES_LONGER * config.steps
    return f"more steps make a better model: --steps {steps} would take about {format_seconds(_TIMES_LONGER * seconds)}"
