"""The loss at chunk starts, on losses that are known exactly."""

import numpy as np
import pytest

from polysketch.evaluation import Evaluation, loss_at_chunk_starts

CHUNK = 16


def evaluation_of(loss_at_position: np.ndarray, counts: np.ndarray | None = None) -> Evaluation:
    """An evaluation of which only the losses at positions matter."""
    counts = np.ones(len(loss_at_position), dtype=np.int64) if counts is None else counts
    return Evaluation(
        loss=0.0,
        perplexity=1.0,
        bits_per_byte=None,
        num_tokens=int(counts.sum()),
        num_bytes=None,
        context_length=len(loss_at_position),
        position_edges=np.array([0, len(loss_at_position)]),
        loss_by_position=np.zeros(1),
        loss_at_position=loss_at_position,
        count_at_position=counts,
    )


def chunked_losses(num_positions: int) -> np.ndarray:
    """5 in the first chunk; in later ones 3 at four starts, 2 at the eight that follow, 7 elsewhere."""
    within = np.arange(num_positions) % CHUNK
    losses = np.where(within < 4, 3.0, np.where(within < 12, 2.0, 7.0))
    losses[:CHUNK] = 5.0
    return losses


@pytest.mark.parametrize("num_positions", [28, 32, 50, 64])
def test_the_penalty_is_starts_minus_what_follows_without_the_first_chunk(num_positions):
    """Also where the last chunk is cut short."""
    result = loss_at_chunk_starts(evaluation_of(chunked_losses(num_positions)), CHUNK, num_starts=4, num_following=8)
    assert (result.starts, result.following, result.penalty) == (3.0, 2.0, 1.0)


def test_positions_weigh_as_many_predictions_as_they_hold():
    """The last window is shorter than the others, so later positions hold fewer."""
    losses = chunked_losses(48)
    losses[32:36] = 9.0
    counts = np.where(np.arange(48) < 32, 3, 1)
    result = loss_at_chunk_starts(evaluation_of(losses, counts), CHUNK, num_starts=4, num_following=8)
    assert result.starts == pytest.approx((3 * 3.0 + 9.0) / 4)


def test_a_context_of_one_chunk_is_refused():
    """It has no chunk start but its own."""
    with pytest.raises(ValueError, match="expected at least 28 positions, found 16"):
        loss_at_chunk_starts(evaluation_of(chunked_losses(16)), CHUNK, num_starts=4, num_following=8)


@pytest.mark.parametrize(("num_starts", "num_following"), [(0, 8), (8, 0), (8, 9)])
def test_counts_that_do_not_fit_in_a_chunk_are_refused(num_starts, num_following):
    """Starts and following positions belong to the same chunk."""
    with pytest.raises(ValueError, match="fit in a chunk of 16"):
        loss_at_chunk_starts(
            evaluation_of(chunked_losses(64)), CHUNK, num_starts=num_starts, num_following=num_following
        )
