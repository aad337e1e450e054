"""As many training steps as fit into some minutes: a few are timed first, and the number is kept."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from statistics import median

from polysketch.studies.kept import kept_or_made
from polysketch.studies.trained import trained
from polysketch.training import TrainingConfig

_WARM_UP, _TIMED = 2, 5  # steps


def steps_in(minutes: float, config: TrainingConfig, place: Path) -> int:
    """Steps that take so many minutes on this machine as it is now, at least one.

    A run that was killed goes on with as many as it began with: their number is in `steps.json`, with what it is from.

    Args:
        minutes: of training steps alone, without evaluations.
        config: of the run, of which seven steps are made first, in a folder of their own.
        place: folder of both.

    Raises:
        Stopped: it was asked to stop.
        ValueError: the number that is there is for other minutes.
    """
    few = dataclasses.replace(config, out=place / "timed", steps=_WARM_UP + _TIMED, log_every=1, eval_every=0)

    def timed() -> dict[str, float]:
        seconds = seconds_a_step(few)
        return {"seconds_a_step": seconds, "steps": max(1, round(60 * minutes / seconds))}

    return int(kept_or_made(place / "steps.json", {"minutes": minutes}, timed)["steps"])


def seconds_a_step(config: TrainingConfig) -> float:
    """The median over the steps of a run, but for the first ones."""
    seconds = trained(config)["curve"]["seconds"]
    return median(after - before for before, after in pairwise(seconds[_WARM_UP - 1 :]))
