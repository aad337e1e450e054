"""The learning rate is a pure function of the step: up, then down."""

import pytest

from polysketch.training.schedule import learning_rate_at


def rates(steps, warmup, peak=1.0):
    return [learning_rate_at(step, steps=steps, warmup=warmup, peak=peak) for step in range(steps)]


def test_it_rises_linearly_to_the_peak_and_falls_linearly_towards_zero():
    assert rates(8, 4, peak=0.4) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (5, 0), (5, 5), (100, 10)])
def test_it_is_positive_and_reaches_the_peak_and_no_more(steps, warmup):
    found = rates(steps, warmup, peak=3e-3)
    assert min(found) > 0
    assert max(found) == pytest.approx(3e-3)
