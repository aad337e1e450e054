"""Hidden tokens of a task's inputs and of text: what is asked is what stood there, and nothing is left out."""

import numpy as np
import pytest

from polysketch.data import PreparedData, prepare
from polysketch.targets import NO_TARGET
from polysketch.tasks import Classification, ClassifiedRows
from polysketch.tasks.masked import MaskedTokens, TaskInputs, TextInputs
from polysketch.tasks.reversal import Reversal

VOCAB = 40
DOCUMENTS = [np.random.default_rng(number).integers(0, VOCAB, 5 + number % 7) for number in range(30)]


def source(documents: int = 1) -> Classification:
    rows = ClassifiedRows.of(DOCUMENTS, [number % 2 for number in range(30 // documents)])
    return Classification({"train": rows, "test": rows}, VOCAB, ["a", "b"], documents=documents)


def restored(row) -> tuple[int, ...]:
    """The row as it was."""
    return tuple(np.where(row.answer == NO_TARGET, row.ids, row.answer).tolist())


@pytest.mark.parametrize("documents", [1, 2])
def test_an_epoch_has_every_document_once_and_hides_other_tokens_in_each(documents: int):
    task = MaskedTokens(TaskInputs(source(documents)), 0.4, seed=3)
    epochs = [[task.row("train", index) for index in range(start, start + 30)] for start in (0, 30)]
    expected = sorted(tuple(document.tolist()) for document in DOCUMENTS)
    for rows in epochs:
        assert sorted(restored(row) for row in rows) == expected
    asked = [{restored(row): (row.answer != NO_TARGET).tolist() for row in rows} for rows in epochs]
    assert sum(asked[0][row] != asked[1][row] for row in asked[0]) > 20
    assert [restored(row) for row in epochs[0]] != [restored(row) for row in epochs[1]]
    assert task.num_rows("train") is None
    assert [restored(task.row("test", index)) for index in range(task.num_rows("test"))] == [
        tuple(document.tolist()) for document in DOCUMENTS
    ]


def test_what_is_asked_is_a_share_of_which_most_is_the_mask_and_some_stays():
    task = MaskedTokens(TaskInputs(Reversal(length=400, symbols=VOCAB)), 0.3)
    rows = [task.row("test", index) for index in range(40)]
    asked = [row.answer != NO_TARGET for row in rows]
    found = np.concatenate([row.ids[where] for row, where in zip(rows, asked, strict=True)])
    true = np.concatenate([row.answer[where] for row, where in zip(rows, asked, strict=True)])
    assert np.mean(np.concatenate(asked)) == pytest.approx(0.3, abs=0.015)
    mask = VOCAB + 1  # behind the symbols and the beginning
    assert task.vocab_size == mask + 1
    assert np.mean(found == mask) == pytest.approx(0.8, abs=0.03)
    assert np.mean(found == true) == pytest.approx(0.1, abs=0.02)
    assert (found[true != found] != 0).any()
    for row, where in zip(rows, asked, strict=True):
        assert (row.ids[~where] < mask).all()


def test_a_row_asks_for_something_however_short_it_is():
    task = MaskedTokens(TaskInputs(Reversal(length=1)), 0.05)
    assert all((task.row("train", index).answer != NO_TARGET).any() for index in range(100))


def test_a_share_of_next_to_nothing_asks_for_one_token_of_any_place():
    task = MaskedTokens(TaskInputs(Reversal(length=5)), 1e-12)
    asked = np.stack([task.row("train", index).answer != NO_TARGET for index in range(100)])
    assert (asked.sum(1) == 1).all()
    assert asked.any(0).all()


def test_text_is_cut_into_windows_and_all_of_it_is_held_out(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / "text" / split).mkdir(parents=True)
        words = np.random.default_rng(0).choice(["one ", "two, ", "three. "], 200)
        (tmp_path / "text" / split / "text.txt").write_text("".join(words))
    prepare([tmp_path / "text"], "bytes", tmp_path / "data", progress=False)
    data = PreparedData.open(tmp_path / "data")
    task = MaskedTokens(TextInputs(data, 48, seed=1), seed=1)
    task = MaskedTokens(TextInputs(data, 50, seed=1), seed=1)
    held = np.asarray(data.split("validation").tokens)
    assert len(held) % 50  # the last one is shorter
    rows = [restored(task.row("validation", index)) for index in range(task.num_rows("validation"))]
    assert np.concatenate(rows).tolist() == held.tolist()
    assert task.num_rows("nothing") == 0
    text = bytes(np.asarray(data.split("train").tokens).astype(np.uint8))
    first, other = restored(task.row("train", 0)), restored(task.row("train", 1))
    assert len(first) == 50
    assert bytes(np.array(first, dtype=np.uint8)) in text
    assert first != other
