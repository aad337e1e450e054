"""The learning rate as a pure function of the step: up, then down as the schedule says."""

import itertools
import math

import pytest

from polysketch.training.schedule import learning_rate_at

SCHEDULES = ["linear", "cosine", "wsd"]
LENGTHS = [(1, 0), (1, 1), (5, 0), (5, 5), (7, 6), (100, 10), (100, 95)]


def rates(steps, warmup, schedule="linear", peak=1.0):
    return [learning_rate_at(step, steps=steps, warmup=warmup, peak=peak, schedule=schedule) for step in range(steps)]


def test_linear_rises_to_the_peak_and_falls_towards_zero():
    assert rates(8, 4, peak=0.4) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.2, 0.1])


def test_linear_is_what_a_schedule_is_without_a_name():
    found = [learning_rate_at(step, steps=9, warmup=2, peak=3e-3) for step in range(9)]
    assert found == rates(9, 2, "linear", peak=3e-3)


def test_cosine_falls_along_half_a_cosine_to_a_tenth():
    found = rates(1010, 10, "cosine")
    assert found[10] == pytest.approx(1.0)
    assert found[510] == pytest.approx(0.55)
    assert found[260] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert 0.1 < found[-1] < 0.1001


def test_wsd_stays_at_the_peak_until_the_last_fifth_and_falls_straight_towards_zero():
    found = rates(50, 5, "wsd")
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[5:41] == [1.0] * 36
    assert found[40:] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_before_the_decay_wsd_does_not_depend_on_the_number_of_steps():
    """So that a run can be made longer from a checkpoint before its decay."""
    assert rates(50, 5, "wsd")[:41] == rates(400, 5, "wsd")[:41]
    assert rates(50, 5, "cosine")[:41] != rates(400, 5, "cosine")[:41]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("steps", "warmup"), LENGTHS)
def test_it_is_positive_and_reaches_the_peak_and_no_more(steps, warmup, schedule):
    found = rates(steps, warmup, schedule, peak=3e-3)
    assert min(found) > 0
    assert max(found) == pytest.approx(3e-3)
    assert found[min(warmup, steps - 1)] == pytest.approx(3e-3)  # the first step after the warm-up too


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("steps", "warmup"), LENGTHS)
def test_it_rises_in_the_warmup_and_never_after(steps, warmup, schedule):
    found = rates(steps, warmup, schedule)
    assert all(earlier < later for earlier, later in itertools.pairwise(found[:warmup]))
    assert all(earlier >= later for earlier, later in itertools.pairwise(found[max(0, warmup - 1) :]))


def test_another_schedule_is_refused():
    with pytest.raises(ValueError, match="--schedule: expected linear, cosine, wsd, found 'constant'"):
        rates(2, 1, "constant")
