"""Tasks made from a seed: the answers are what the task says, and rows are functions of their number alone."""

import dataclasses
import statistics

import numpy as np
import pytest

from polysketch.targets import NO_TARGET
from polysketch.tasks import TASKS, Classification, GeneratedTask, task_class
from polysketch.tasks.copying import SelectiveCopying
from polysketch.tasks.induction import Induction
from polysketch.tasks.listops import SYMBOLS, ListOps
from polysketch.tasks.mad import Compression, InContextRecall, Memorization
from polysketch.tasks.reversal import Reversal

SMALL = {
    "selective-copying": {"length": 60, "content": 5, "minimum_gap": 7},
    "induction": {"length": 40, "minimum_gap": 3},
    "recall": {"length": 64, "vocabulary": 40, "pairs": 6},
    "reversal": {"length": 9, "shortest": 3},
    "listops": {"shortest": 5, "length": 60},
    "in-context-recall": {"noise_vocabulary": 4, "noise_share": 0.3, "key_motif": 2, "value_motif": 3},
    "memorization": {},
    "compression": {"length": 9},
}


def small(name: str, **options) -> GeneratedTask:
    return task_class(name)(**SMALL[name], **options)


EACH = pytest.mark.parametrize("name", TASKS)


@EACH
def test_a_row_is_a_function_of_seed_split_and_number(name: str):
    task = small(name)
    batch, again = (task.rows("train", np.array([3, 1, 3])) for _ in range(2))
    assert batch.answers.equal(again.answers)
    assert batch.inputs["ids" if "source" not in batch.inputs else "source"].equal(
        again.inputs["ids" if "source" not in again.inputs else "source"]
    )
    first = task.row("train", 3)
    assert (batch.inputs["ids"][0, : len(first.ids)].numpy() == first.ids).all()
    assert batch.inputs["ids"][0].equal(batch.inputs["ids"][2])
    others = [task.row("train", 4), task.row("test", 3), small(name, seed=1).row("train", 3)]
    assert all(len(row.ids) != len(first.ids) or (row.ids != first.ids).any() for row in others)


@EACH
def test_ids_lie_in_the_vocabulary_and_something_is_asked(name: str):
    task = small(name)
    for index in range(50):
        row = task.row("train", index)
        assert row.ids.min() >= 0
        assert row.ids.max() < task.vocab_size
        assert 1 <= len(row.ids) <= task.longest
        if task.asks == "class":
            assert 0 <= row.answer < task.num_classes
        else:
            asked = row.answer[row.answer != NO_TARGET]
            assert len(row.answer) == len(row.ids)
            assert len(asked)
            assert 0 <= asked.min() <= asked.max() < task.vocab_size


def test_examples_end_and_other_splits_do_not():
    assert small("induction").num_rows("train") is None
    task = small("induction", examples=7)
    assert task.num_rows("train") == 7
    assert task.num_rows("test") is None


def test_what_is_copied_is_the_content_in_its_order():
    task = SelectiveCopying(length=60, content=5, minimum_gap=7)
    for index in range(20):
        row = task.row("train", index)
        content = row.ids[:-5]
        assert (row.ids[-5:] == 15).all()
        assert (content[-7:] == 0).all()
        assert (content[content > 0] == row.answer[-5:]).all()
        assert (row.answer[:-5] == NO_TARGET).all()


def test_induction_asks_for_what_followed_the_special_token():
    task = Induction(length=40, minimum_gap=3)
    for index in range(50):
        row = task.row("train", index)
        (first, last) = np.flatnonzero(row.ids == 16)
        assert last == 39
        assert first + 1 < 39 - 3
        assert row.answer[-1] == row.ids[first + 1]
        assert (row.answer[:-1] == NO_TARGET).all()


def test_compression_asks_for_all_but_the_last_token_which_is_always_the_same():
    rows = [Compression(length=9).row("train", index) for index in range(200)]
    assert all(row.ids[-1] == 15 and row.answer[-1] == NO_TARGET for row in rows)
    assert all((row.answer[:-1] == row.ids[:-1]).all() for row in rows)
    assert {*np.concatenate([row.ids[:-1] for row in rows])} == {*range(15)}


@pytest.mark.parametrize("asks", ["each", "written"])
def test_reversal_is_the_row_backwards(asks: str):
    row = Reversal(asks=asks, length=9).row("train", 2)
    assert (row.answer == row.ids[::-1]).all()
    assert row.ids.min() >= 1


OPERATORS = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(statistics.median(x)), "[SM": lambda x: sum(x) % 10}


def value_of(symbols: list[str]) -> int:
    """The value of a list, computed from its symbols, which are used up."""
    symbol = symbols.pop(0)
    if symbol not in OPERATORS:
        return int(symbol)
    values = []
    while symbols[0] != "]":
        values.append(value_of(symbols))
    symbols.pop(0)
    return OPERATORS[symbol](values)


def test_a_list_has_the_value_of_its_symbols():
    task = ListOps(shortest=20, length=200)
    for index in range(30):
        row = task.row("train", index)
        assert 20 <= len(row.ids) <= 200
        symbols = [SYMBOLS[number] for number in row.ids]
        assert value_of(symbols) == row.answer
        assert symbols == []
    assert value_of(["[MED", "1", "2", "[SM", "9", "9", "]", "4", "]"]) == 3  # of 1, 2, 8, 4: between 2 and 4


@pytest.mark.parametrize(
    "options",
    [{}, {"noise_vocabulary": 4, "noise_share": 0.3}, {"key_motif": 3, "value_motif": 3}],
    ids=["plain", "noisy", "fuzzy"],
)
def test_in_context_recall_asks_for_the_value_that_the_key_has_had(options):
    """Read from left to right: keys are the lower ids, values the next ones; noise is neither."""
    task = InContextRecall(**options)
    num_asked = 0
    for index in range(20):
        row = task.row("train", index)
        values, at = {}, 0
        while at < task.length:
            key = at
            while key < task.length and row.ids[key] < 8:
                key += 1
            end = key
            while end < task.length and 8 <= row.ids[end] < 16:
                end += 1
            if end == at:  # noise, or the end
                assert row.answer[at] == NO_TARGET
                at += 1
                continue
            pair, value = tuple(row.ids[at:key]), row.ids[key:end]
            asked = row.answer[key - 1 : end - 1]
            if pair in values:
                assert (asked == value).all()
                assert (values[pair] == value).all()
                num_asked += len(value)
            else:
                assert (asked == NO_TARGET).all()
                values[pair] = value
            assert row.answer[end - 1] == NO_TARGET
            at = end
    assert num_asked > 100


def test_memorization_has_one_value_a_key_in_all_rows_and_in_no_row():
    task, values = Memorization(), {}
    for index in range(200):
        row = task.row(("train", "test")[index % 2], index)
        assert (row.ids[1::2] == 255).all()
        assert (row.answer[::2] == NO_TARGET).all()
        for key, value in zip(row.ids[::2], row.answer[1::2], strict=True):
            assert values.setdefault(key, value) == value
            assert 127 <= value < 254
    assert len(set(values.values())) == len(values) > 100
    assert dataclasses.replace(task, seed=1).row("train", 0).answer.tolist() != task.row("train", 0).answer.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"vocabulary": 100_000, "length": 8},
        {"vocabulary": 64, "length": 16, "noise_share": 0.9, "noise_vocabulary": 4},
        {"vocabulary": 1_000, "length": 40, "key_motif": 3, "value_motif": 3},
    ],
)
def test_every_row_of_a_large_vocabulary_has_a_key_that_comes_again(options):
    task = InContextRecall(**options)
    for index in range(30):
        row = task.row("train", index)
        asked = np.flatnonzero(row.answer != NO_TARGET)
        ids = row.ids.tolist()
        assert len(asked) > 0
        assert ids[asked[0]] in ids[: asked[0]]
        assert ids[asked[0] + 1] == row.answer[asked[0]]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("selective-copying", {"length": 20, "content": 16}, "a length of at least 32"),
        ("induction", {"length": 4, "minimum_gap": 3}, "a length of at least 6"),
        ("recall", {"pairs": 5000}, "pairs"),
        ("reversal", {"length": 3, "shortest": 4}, "a shortest"),
        ("reversal", {"asks": "next"}, "asks must be"),
        ("listops", {"shortest": 3, "length": 3}, "allow other lengths"),
        ("in-context-recall", {"length": 3}, "room for two pairs"),
        ("in-context-recall", {"noise_share": 0.5}, "ids for it"),
        ("memorization", {"length": 5}, "an even length"),
        ("compression", {"length": 1}, "a length from 2 on"),
        ("induction", {"seed": -1}, "not be negative"),
    ],
)
def test_sizes_that_cannot_be_are_refused_at_once(name: str, options, message: str):
    with pytest.raises(ValueError, match=message):
        task_class(name)(**options)


def test_an_unknown_task_is_told_with_the_known_ones():
    with pytest.raises(ValueError, match="known tasks: selective-copying, induction"):
        task_class("copying")
    assert Classification.name not in TASKS
