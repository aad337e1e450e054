"""The loss where a local chunk begins, against the loss a little later: does the model use its sketched prefix?"""

from dataclasses import dataclass

import numpy as np

from polysketch.evaluation.evaluate import Evaluation

__all__ = ["ChunkStartLoss", "loss_at_chunk_starts"]


@dataclass(frozen=True)
class ChunkStartLoss:
    """Mean losses in nats per token at two places of every local chunk but the first.

    Attributes:
        starts: mean loss at the first positions of a chunk, where only the sketched prefix reaches back.
        following: mean loss at the positions right after them.
        penalty: starts - following. Near zero when the prefix serves as well as the local part; attention without any
            prefix shows what its absence costs.
    """

    starts: float
    following: float
    penalty: float


def loss_at_chunk_starts(
    evaluation: Evaluation, chunk: int, *, num_starts: int = 8, num_following: int = 24
) -> ChunkStartLoss:
    """Compare the loss at the starts of local chunks with the loss that follows, from one evaluation.

    The first chunk is left out: there the local part sees everything. Total loss hides a prefix that is not used;
    this does not, because at a chunk's first position the local part sees one token.

    Args:
        evaluation: result of `evaluate` at a context longer than one chunk.
        chunk: the model's `local_chunk`.
        num_starts: positions counted as the start of a chunk.
        num_following: positions after those that they are compared with.

    Raises:
        ValueError: the context has no second chunk, or num_starts + num_following do not fit in a chunk.
    """
    num_positions = len(evaluation.loss_at_position)
    if num_starts < 1 or num_following < 1 or num_starts + num_following > chunk:
        raise ValueError(
            f"expected num_starts and num_following of at least 1 that fit in a chunk of {chunk}, "
            f"found {num_starts} and {num_following}"
        )
    if num_positions < chunk + num_starts + num_following:
        raise ValueError(
            f"expected at least {chunk + num_starts + num_following} positions, found {num_positions}: "
            "a context of one chunk has no chunk start to measure"
        )
    positions = np.arange(chunk, num_positions)
    within = positions % chunk
    starts = _mean_loss(evaluation, positions[within < num_starts])
    following = _mean_loss(evaluation, positions[(within >= num_starts) & (within < num_starts + num_following)])
    return ChunkStartLoss(starts, following, starts - following)


def _mean_loss(evaluation: Evaluation, positions: np.ndarray) -> float:
    """Return the mean loss over all predictions made at `positions`."""
    counts = evaluation.count_at_position[positions]
    return float((evaluation.loss_at_position[positions] * counts).sum() / counts.sum())
