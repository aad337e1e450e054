"""Training windows are a pure function of (seed, sample index) and cover the data."""

import numpy as np
import pytest
import torch

from polysketch.data import TrainingWindows
from polysketch.data.permutation import KeyedPermutation, KeyedPermutations

LENGTHS = [9, 10, 15, 16, 17, 24, 25, 100, 1001]


def windows_of(length: int, context_length: int = 8, seed: int = 3) -> TrainingWindows:
    """Windows over tokens that are their own positions."""
    return TrainingWindows(np.arange(length, dtype=np.uint16), context_length, seed)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16, 17, 63, 64, 65, 1000, 4096, 5001])
def test_a_keyed_permutation_hits_every_position_once(size):
    for key in range(5):
        images = KeyedPermutation(size, key)(np.arange(size))
        assert np.array_equal(np.sort(images), np.arange(size))


def test_a_keyed_permutation_works_at_any_size_without_storing_it():
    permutation = KeyedPermutation(2**62 - 7, 1)
    images = permutation(np.arange(0, 2**62 - 7, 2**50))
    assert len(np.unique(images)) == len(images)
    assert 0 <= images.min() < images.max() < 2**62 - 7


@pytest.mark.parametrize("size", [2, 3, 7, 20])
def test_every_position_goes_anywhere_equally_often(size):
    keys = 100
    images = np.stack([KeyedPermutation(size, key)(np.arange(size)) for key in range(keys)])
    for position in range(size):
        counts = np.bincount(images[:, position], minlength=size)
        # chi-square with size - 1 degrees of freedom: mean size - 1, standard deviation sqrt(2 (size - 1))
        statistic = ((counts - keys / size) ** 2).sum() / (keys / size)
        assert statistic < size - 1 + 6 * np.sqrt(2 * (size - 1))


def test_neighbours_do_not_stay_neighbours():
    images = KeyedPermutation(10_000, 0)(np.arange(10_000))
    assert (np.abs(np.diff(images)) == 1).mean() < 0.002
    assert abs(np.corrcoef(images, np.arange(10_000))[0, 1]) < 0.05


def test_permutations_of_many_sizes_hit_every_position_once():
    sizes = np.array([0, 1, 2, 5, 63, 64, 65, 100, 0, 1000, 4097])
    which = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.concatenate([np.arange(size) for size in sizes])
    for key in range(5):
        images = KeyedPermutations(sizes, key)(which, positions)
        assert all(np.array_equal(np.sort(images[which == one]), np.arange(size)) for one, size in enumerate(sizes))


def test_permutations_depend_on_key_and_place_and_not_on_what_is_asked_with_them():
    sizes = np.array([50, 50, 3000, 3000])
    first, other = KeyedPermutations(sizes, 0), KeyedPermutations(sizes, 1)
    orders = [
        order(np.full(size, which), np.arange(size)).tolist()
        for order in (first, other)
        for which, size in enumerate(sizes)
    ]
    assert len({tuple(order) for order in orders}) == 8
    together = first(np.array([3, 0, 2, 3]), np.array([7, 49, 1000, 8]))
    assert together.tolist() == [orders[3][7], orders[0][49], orders[2][1000], orders[3][8]]


@pytest.mark.parametrize("size", [2, 7, 100])
def test_each_of_many_permutations_sends_a_position_anywhere_equally_often(size):
    many = 600
    which, positions = np.repeat(np.arange(many), size), np.tile(np.arange(size), many)
    images = KeyedPermutations(np.full(many, size), 0)(which, positions).reshape(many, size)
    for position in range(size):
        counts = np.bincount(images[:, position], minlength=size)
        statistic = ((counts - many / size) ** 2).sum() / (many / size)
        assert statistic < size - 1 + 6 * np.sqrt(2 * (size - 1))


@pytest.mark.parametrize(("size", "positions"), [(0, [0]), (2**63, [0]), (5, [5]), (5, [-1])])
def test_a_permutation_refuses_what_lies_outside(size, positions):
    with pytest.raises(ValueError, match="expected"):
        KeyedPermutation(size, 0)(np.array(positions))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_window_is_consecutive_tokens_and_one_target_more(length):
    windows = windows_of(length)
    for index in range(3 * windows.num_windows):
        window = windows.window(index)
        assert window.dtype == torch.int64
        assert window.shape == (9,)
        assert torch.equal(window, window[0] + torch.arange(9))


@pytest.mark.parametrize("length", LENGTHS)
def test_an_epoch_predicts_no_token_twice_and_leaves_out_less_than_two_windows(length):
    windows = windows_of(length)
    for epoch in range(4):
        batch = windows.batch(epoch, windows.num_windows)
        targets = batch[:, 1:].flatten().tolist()
        assert len(set(targets)) == len(targets) == windows.num_windows * 8
        assert length - 1 - len(targets) < 16
        assert sorted(targets) == list(range(min(targets), max(targets) + 1))


def test_over_the_epochs_every_token_is_predicted():
    windows = windows_of(100)
    targets = {
        token for epoch in range(60) for token in windows.batch(epoch, windows.num_windows)[:, 1:].flatten().tolist()
    }
    assert targets == set(range(1, 100))


def test_epochs_differ_in_order_and_offset():
    windows = windows_of(1001)
    epochs = [windows.batch(epoch, windows.num_windows)[:, 0] for epoch in range(6)]
    assert len({tuple(starts.tolist()) for starts in epochs}) == 6
    assert len({int(starts.min()) for starts in epochs}) > 2


def test_a_window_depends_on_seed_and_index_alone():
    first, second, other = windows_of(1001), windows_of(1001), windows_of(1001, seed=4)
    second.batch(5, 16)  # nothing is consumed
    indices = [0, 7, 123, 124, 1_000_000, 10**15]
    assert all(torch.equal(first.window(index), second.window(index)) for index in indices)
    assert any(not torch.equal(first.window(index), other.window(index)) for index in indices)


def test_the_order_is_the_same_in_every_version():
    # Change this only with a note in the changelog: resumed runs would see other data.
    assert windows_of(1001, seed=0).batch(0, 8)[:, 0].tolist() == [730, 226, 394, 378, 250, 154, 530, 882]


def test_a_batch_is_the_windows_of_its_sample_indices():
    windows = windows_of(100)
    batch = windows.batch(5, 12)  # crosses from one epoch into another
    assert torch.equal(batch, torch.stack([windows.window(index) for index in range(60, 72)]))


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_of_nothing_is_refused(batch_size):
    with pytest.raises(ValueError, match="batch size of at least 1"):
        windows_of(100).batch(0, batch_size)


@pytest.mark.parametrize("index", [-1, -100])
def test_a_negative_index_is_refused(index):
    with pytest.raises(ValueError, match="at least 0"):
        windows_of(100).window(index)


def test_a_context_without_tokens_is_refused():
    with pytest.raises(ValueError, match="context length"):
        windows_of(100, context_length=0)
    with pytest.raises(ValueError, match=r"at least 9 tokens.*found 8"):
        windows_of(8)
