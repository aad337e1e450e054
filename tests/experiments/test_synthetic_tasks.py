"""The synthetic tasks: what they ask is told by the sequence, from where they say, and never by what is nearby."""

import dataclasses

import pytest
import torch
from experiments.mechanisms.synthetic import TASKS
from experiments.mechanisms.variants import VARIANTS
from experiments.synthetic.induction import InductionTask
from experiments.synthetic.selective_copying import NOISE, SelectiveCopyingTask

COPYING = SelectiveCopyingTask(length=40, content=5, minimum_gap=9, batch_size=200)
INDUCTION = InductionTask(length=20, minimum_gap=6, batch_size=400, test_lengths=(20, 70, 300), test_sequences=30)
SIZES = [pytest.param(task, id=f"{name}-{size}") for name, sizes in TASKS.items() for size, task in sizes.items()]


def test_the_markers_are_answered_by_the_content_in_its_order():
    ids, labels = COPYING.batch(0)
    for row, asked in zip(ids.tolist(), labels.tolist(), strict=True):
        content = [token for token in row[:-5] if token != NOISE]
        assert asked == [-100] * 35 + content
        assert row[-5:] == [15] * 5
        assert all(1 <= token <= 14 for token in content)


def test_content_stands_anywhere_before_the_gap_and_never_in_it():
    ids, _ = COPYING.batch(0)
    found = (ids[:, :-5] != NOISE).any(0)
    assert found.tolist() == [True] * 26 + [False] * 9
    assert ids.unique().tolist() == list(range(16))


def test_the_special_token_is_answered_by_what_followed_it_the_first_time():
    ids, labels = INDUCTION.batch(0)
    for row, asked in zip(ids.tolist(), labels.tolist(), strict=True):
        places = [place for place, token in enumerate(row) if token == 16]
        assert len(places) == 2
        assert places[1] == 19
        assert asked == [-100] * 19 + [row[places[0] + 1]]


def test_the_answer_of_induction_stands_anywhere_before_the_gap_and_never_in_it():
    ids, labels = INDUCTION.batch(0)
    answers = {row.index(16) + 1 for row in ids.tolist()}
    assert answers == set(range(1, 13))  # then 6 positions, then the question at 19
    assert labels[:, -1].unique().tolist() == list(range(16))


def test_test_lengths_ask_the_same_of_longer_sequences_and_hold_no_more_tokens_at_once():
    for task, length in zip(INDUCTION.at_test_lengths(), (20, 70, 300), strict=True):
        batches = [ids for ids, _ in task.held_out()]
        assert {ids.shape[1] for ids in batches} == {length}
        assert 30 <= sum(map(len, batches)) < 30 + len(batches[0])
        assert batches[0].numel() <= INDUCTION.batch_size * INDUCTION.length
    assert COPYING.at_test_lengths() == ()


@pytest.mark.parametrize("task", [COPYING, INDUCTION], ids=["copying", "induction"])
def test_a_batch_is_a_function_of_seed_and_index_and_held_out_batches_are_others(task):
    assert torch.equal(task.batch(3)[0], task.batch(3)[0])
    other_seed = dataclasses.replace(task, seed=1)
    others = [task.batch(4), task.batch(3, held_out=True), other_seed.batch(3)]
    assert all(not torch.equal(task.batch(3)[0], ids) for ids, _ in others)


@pytest.mark.parametrize("task", SIZES)
@pytest.mark.parametrize("name", ["sliding-window", "local"])
def test_attention_to_nearby_tokens_alone_cannot_see_an_answer(task, name):
    task = dataclasses.replace(task, batch_size=1, width=64)
    ids, labels = task.batch(0)
    asked = labels[0] >= 0
    first = int(asked.nonzero()[0])
    other = ids.clone()
    other[:, : first - task.minimum_gap] = ids[:, : first - task.minimum_gap].flip(1)
    model = task.model(VARIANTS[name]).eval()
    with torch.no_grad():
        one, two = (model.hidden_states(given)[0, asked] for given in (ids, other))
    assert not torch.equal(ids, other)
    assert torch.equal(one, two)


@pytest.mark.parametrize("task", SIZES)
def test_softmax_sees_what_is_beyond_the_gap(task):
    task = dataclasses.replace(task, batch_size=1, width=64)
    ids, labels = task.batch(0)
    other = ids.clone()
    other[:, : int((labels[0] >= 0).nonzero()[0]) - task.minimum_gap] = 1
    model = task.model(VARIANTS["softmax"]).eval()
    with torch.no_grad():
        assert not torch.equal(model.hidden_states(ids)[0, -1], model.hidden_states(other)[0, -1])


def test_a_task_without_room_is_refused():
    with pytest.raises(ValueError, match="length of at least 19 for 5 content tokens"):
        dataclasses.replace(COPYING, length=18).batch(0)
    with pytest.raises(ValueError, match="length of at least 9 for a gap of 6"):
        dataclasses.replace(INDUCTION, length=8).batch(0)
    assert dataclasses.replace(COPYING, length=19).batch(0)[0].shape == (200, 19)
    assert dataclasses.replace(INDUCTION, length=9).batch(0)[0].shape == (400, 9)
