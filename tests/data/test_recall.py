"""Recall batches ask for what was shown, no sooner than wanted, and are a pure function of their arguments."""

import numpy as np
import pytest
import torch

from polysketch.data.recall import recall_batch
from polysketch.targets import NO_TARGET

SETTINGS = {"length": 128, "num_pairs": 16, "vocab_size": 512, "seed": 0, "index": 0}


@pytest.mark.parametrize("filler", ["zero", "random"])
@pytest.mark.parametrize("minimum_gap", [0, 1, 33, 64])
def test_every_query_asks_for_the_value_of_its_key(filler, minimum_gap):
    ids, labels = recall_batch(20, **SETTINGS, filler=filler, minimum_gap=minimum_gap)
    assert ids.shape == labels.shape == (20, 128)
    assert ids.dtype == labels.dtype == torch.int64
    for row, asked in zip(ids.tolist(), labels.tolist(), strict=True):
        pairs = dict(zip(row[0:32:2], row[1:32:2], strict=True))
        queries = [position for position, label in enumerate(asked) if label != NO_TARGET]
        assert len(pairs) == len(queries) == 16
        assert {row[position] for position in queries} == set(pairs)
        for position in queries:
            assert asked[position] == pairs[row[position]]
            assert position % 2 == 0
            assert position - (row.index(row[position], 0, 32) + 1) >= minimum_gap


def test_keys_and_values_come_from_their_halves_and_all_of_them_occur():
    ids, labels = recall_batch(600, **SETTINGS)
    assert set(ids[:, 0:32:2].flatten().tolist()) == set(range(1, 256))
    assert set(ids[:, 1:32:2].flatten().tolist()) == set(range(256, 512))
    assert set(labels.flatten().tolist()) == {NO_TARGET, *range(256, 512)}


def test_the_filler_is_zero_or_anything():
    ids, labels = recall_batch(200, **SETTINGS)
    assert (ids[:, 32:][labels[:, 32:] == NO_TARGET] == 0).all()
    ids, labels = recall_batch(200, **SETTINGS, filler="random")
    assert set(ids[:, 32:][labels[:, 32:] == NO_TARGET].tolist()) == set(range(512))


def test_a_batch_depends_on_its_arguments_alone():
    first = recall_batch(8, **SETTINGS)
    np.random.seed(5)  # noqa: NPY002 - global randomness must not matter
    torch.manual_seed(5)
    again = recall_batch(8, **SETTINGS)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    for change in ({"seed": 1}, {"index": 1}):
        assert not torch.equal(first[0], recall_batch(8, **SETTINGS | change)[0])


@pytest.mark.parametrize("minimum_gap", [0, 40])
def test_slots_are_drawn_by_the_power_law(minimum_gap):
    settings = {"length": 64, "num_pairs": 1, "vocab_size": 64, "seed": 1, "index": 0}
    _, labels = recall_batch(40_000, **settings, minimum_gap=minimum_gap)
    slots = (labels != NO_TARGET).nonzero()[:, 1].sub(2).div(2, rounding_mode="floor")
    counts = np.bincount(slots.numpy(), minlength=31)
    weights = 0.01 * np.arange(1.0, 32.0) ** (0.01 - 1) * (2 * np.arange(31) + 1 >= minimum_gap)
    assert counts / 40_000 == pytest.approx(weights / weights.sum(), abs=0.012)


@pytest.mark.parametrize("change", [{"num_pairs": 32}, {"length": 64}])
def test_the_tightest_fit_still_works(change):
    _, labels = recall_batch(3, **SETTINGS | change)
    assert (labels != NO_TARGET).sum() == 3 * (SETTINGS | change)["num_pairs"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pairs": 0}, "pairs"),
        ({"vocab_size": 32}, "1 to 15 pairs"),
        ({"length": 62}, "a slot for each"),
        ({"minimum_gap": 90}, "a slot for each of the 16 queries, found 3"),
        ({"minimum_gap": -1}, "minimum_gap must be at least 0"),
        ({"filler": "ones"}, "zero, random"),
        ({"index": -1}, "non-negative"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        recall_batch(2, **SETTINGS | change)
