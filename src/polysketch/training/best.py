"""The evaluation with the least loss of a run, and its checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polysketch.training.checkpoint import BEST, checkpoint_name


@dataclass(frozen=True)
class BestEvaluation:
    """The evaluation with the least validation loss so far.

    Attributes:
        step: number of optimizer steps made before it.
        loss: in nats per token.
        measured: how it was measured, JSON values; None in checkpoints of earlier versions, which do not say.
    """

    step: int
    loss: float
    measured: Mapping[str, Any] | None = None

    def entry(self) -> dict[str, Any]:
        """For the JSON state of a checkpoint."""
        return {BEST: asdict(self)}


def better(
    best: BestEvaluation | None, step: int, loss: float | None, measured: Mapping[str, Any] | None = None
) -> BestEvaluation | None:
    """The better of the best so far and of the evaluation after `step` steps; the earlier one where both are equal.

    Args:
        best: None before the first.
        step: number of optimizer steps made.
        loss: of its evaluation; None or a number that is not finite is never better.
        measured: how it was measured; as `best` was, if there is one.
    """
    if loss is None or not math.isfinite(loss) or (best is not None and loss >= best.loss):
        return best
    return BestEvaluation(step, loss, measured)


def best_of(state: Mapping[str, Any], checkpoints: Path) -> BestEvaluation | None:
    """What the state of a checkpoint says, if the best one is still there.

    It is not there where a run goes on from an earlier step, after a better one had taken its place.

    Args:
        state: JSON state of the checkpoint that the run goes on from.
        checkpoints: the folder of checkpoints.
    """
    entry = state.get(BEST)
    if entry is None or not (checkpoints / checkpoint_name(entry["step"])).is_dir():
        return None
    return BestEvaluation(entry["step"], entry["loss"], entry.get("measured"))
