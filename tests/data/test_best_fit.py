"""Best fit decreasing by groups is best fit decreasing piece by piece, and leaves little room."""

import numpy as np
import pytest

from polysketch.data.best_fit import best_fit_decreasing

CAPACITY = 64


def one_by_one(lengths, capacity):
    """The definition: each piece, the longest first, into the row with the least room that takes it."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        takes = [row for row in rows if capacity - sum(row) >= length]
        best = min(takes, key=lambda row: capacity - sum(row), default=None)
        if best is None:
            rows.append(best := [])
        best.append(length)
    return rows


def packed(lengths, capacity):
    """The rows of the groups, one list of lengths each."""
    kinds = best_fit_decreasing(np.bincount(lengths, minlength=capacity + 1), capacity)
    rows = [[length for length, many in kind.pieces for _ in range(many)] for kind in kinds for _ in range(kind.rows)]
    assert all(kind.rows > 0 for kind in kinds)
    return rows


def made_lengths(name, count=500):
    draw = np.random.default_rng(0)
    lengths = {
        "uniform": draw.integers(1, CAPACITY + 1, count),
        "short": draw.geometric(0.2, count),
        "many of few": draw.choice([1, 2, 31, 33, 50], count),
        "above half": draw.integers(CAPACITY // 2 + 1, CAPACITY + 1, count),
        "ones": np.ones(count, dtype=np.int64),
        "whole rows": np.full(count, CAPACITY),
    }
    return np.minimum(lengths[name], CAPACITY)


NAMES = ["uniform", "short", "many of few", "above half", "ones", "whole rows"]


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_every_piece_once_and_no_row_overflows(name):
    lengths = made_lengths(name)
    rows = packed(lengths, CAPACITY)
    assert sorted(piece for row in rows for piece in row) == sorted(lengths.tolist())
    assert max(map(sum, rows)) <= CAPACITY


@pytest.mark.parametrize("name", NAMES)
def test_groups_leave_the_rooms_that_single_pieces_leave(name):
    lengths = made_lengths(name)
    rooms = sorted(CAPACITY - sum(row) for row in packed(lengths, CAPACITY))
    assert rooms == sorted(CAPACITY - sum(row) for row in one_by_one(lengths.tolist(), CAPACITY))


def test_small_cases_by_hand():
    assert packed([6, 5, 4, 3, 2], 10) == [[6, 4], [5, 3, 2]]
    assert packed([10, 1], 10) == [[10], [1]]
    assert sorted(packed([4, 4, 4, 4, 4], 10)) == [[4], [4, 4], [4, 4]]
    assert packed([1], 1) == [[1]]


def test_a_billion_pieces_take_no_longer_than_their_lengths_are_many():
    counts = np.zeros(2049, dtype=np.int64)
    counts[1:] = 1e12 / np.arange(1, 2049) ** 1.5
    kinds = best_fit_decreasing(counts, 2048)
    assert len(kinds) < 3 * 2048
    held = np.zeros_like(counts)
    for kind in kinds:
        for length, many in kind.pieces:
            held[length] += kind.rows * many
    assert np.array_equal(held, counts)
