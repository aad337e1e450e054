"""Words with a label each, out of local files."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from polysketch.data.tokenization import BytesTokenizer
from polysketch.tasks import AnsweredRows, SequenceAnswers, open_task, verify_task, write_task
from polysketch.tasks.labelled_words import labelled_words
from polysketch.tasks.sources import split_off

SENTENCES = [
    (["Ada", "met", "Tom"], ["NAME", "O", "NAME"]),
    (["no", "one"], ["O", "O"]),
    (["Oslo", "is", "far"], ["PLACE", "O", "O"]),
]


def json_lines(path: Path, sentences=SENTENCES, words: str = "tokens", labels: str = "labels") -> Path:
    content = "\n\n".join(json.dumps({words: each, labels: of_each}) for each, of_each in sentences)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


def read(path: Path, **options) -> SequenceAnswers:
    return labelled_words({"train": [path]}, BytesTokenizer().encode, 257, **options)


def same(one: SequenceAnswers, other: SequenceAnswers, split: str = "train") -> bool:
    rows = [
        [(row.ids.tolist(), row.answer.tolist()) for row in map(task.rows_of(split).row, range(len(SENTENCES)))]
        for task in (one, other)
    ]
    return rows[0] == rows[1] and one.options() == other.options()


def test_the_first_token_of_a_word_has_its_label_and_others_ask_nothing(tmp_path: Path):
    task = read(json_lines(tmp_path / "a.jsonl"), alphabet="x")
    assert (task.asks, task.class_names, task.num_classes, task.longest) == ("labels", ("NAME", "O", "PLACE"), 3, 12)
    batch = task.rows("train", np.array([0, 1]))
    assert bytes(batch.inputs["ids"][0].tolist()) == b" Ada met Tom"
    nothing = -100
    assert batch.answers.tolist() == [
        [0, nothing, nothing, nothing, 1, nothing, nothing, nothing, 0, nothing, nothing, nothing],
        [1, nothing, nothing, 1, *[nothing] * 8],
    ]
    assert batch.inputs["key_mask"].sum(1).tolist() == [12, 7]
    assert batch.num_tokens == 5


def test_layouts_of_one_content_give_the_same_rows(tmp_path: Path):
    expected = read(json_lines(tmp_path / "a.jsonl"))
    named = json_lines(tmp_path / "b.jsonl.gz", words="words", labels="ner_tags")
    assert same(read(named, words_field="words", labels_field="ner_tags"), expected)
    tabs = "\n".join("".join(f"{word}\t{label}\n" for word, label in zip(*each, strict=True)) for each in SENTENCES)
    four = "-DOCSTART- -X- -X- O\n\n" + tabs.replace("\t", " NN I-NP ") + "\n\n"  # as CoNLL-2003 has them
    for name, content in (
        ("a.tsv", tabs),
        ("a.conll", four),
        ("alone.conll", "-DOCSTART-\n\n" + tabs),
        ("a.txt", "\ufeff" + tabs.replace("\n", "\r\n").strip()),
    ):
        (tmp_path / name).write_text(content, "utf-8", newline="")
        assert same(read(tmp_path / name), expected), name


def test_comments_of_a_table_with_tabs_are_passed_over(tmp_path: Path):
    rows = ["# sent_id = 1", "Ada\tB", "#\tO", "", "# text = Tom", "#", "Tom\tB", "", "came\tO"]
    (tmp_path / "a.conll").write_text("\n".join(rows))
    expected = [(["Ada", "#"], ["B", "O"]), (["Tom"], ["B"]), (["came"], ["O"])]
    assert same(read(tmp_path / "a.conll"), read(json_lines(tmp_path / "a.jsonl", expected)))
    (tmp_path / "spaces.conll").write_text("# O\nAda B\n")
    assert read(tmp_path / "spaces.conll").class_names == ("B", "O")


def test_numbers_are_labels_and_one_of_them_asks_nothing(tmp_path: Path):
    task = read(json_lines(tmp_path / "a.jsonl", [(["a", "b", "c", "d"], [10, -100, 0, 2])]))
    assert task.class_names == ("0", "2", "10")
    assert task.row("train", 0).answer.tolist() == [2, -100, -100, -100, 0, -100, 1, -100]


def test_they_come_back_from_their_folder_and_no_row_is_lost(tmp_path: Path):
    task = labelled_words({"train": [json_lines(tmp_path / "a.jsonl")] * 2}, BytesTokenizer().encode, 257)
    parts = split_off(task, 0.5)
    write_task(parts, tmp_path / "task")
    found = open_task(tmp_path / "task")
    verify_task(tmp_path / "task")
    assert (found.num_rows("train"), found.num_rows("validation"), found.num_rows("test")) == (3, 3, 0)
    assert found.options() == task.options()
    rows = [found.row(split, index) for split in ("train", "validation") for index in range(3)]
    expected = [task.row("train", index) for index in range(6)]
    as_lists = [sorted((row.ids.tolist(), row.answer.tolist()) for row in each) for each in (rows, expected)]
    assert as_lists[0] == as_lists[1]
    (tmp_path / "task" / "train.answers.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="files of train that belong together, found one cut short"):
        open_task(tmp_path / "task")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", r"expected sentences with labels in .*a\.jsonl, found none"),
        ("a.conll", "\n\n", r"expected sentences with labels in .*a\.conll, found none"),
        ("a.jsonl", '{"text": "a"}', r"a\.jsonl:1: expected an object with 'tokens' and 'labels'"),
        ("a.jsonl", '{"tokens": "a b", "labels": ["O", "O"]}', "a list of words and a list of as many labels"),
        ("a.jsonl", '{"tokens": ["a", "b"], "labels": ["O"]}', "a list of words and a list of as many labels"),
        ("a.jsonl", '{"tokens": [], "labels": []}', "a list of words and a list of as many labels"),
        ("a.jsonl", '{"tokens": ["a"], "labels": [0.5]}', "a list of words and a list of as many labels"),
        ("a.jsonl", '{"tokens": ["a"], "labels": [-100]}', "a.jsonl:1: expected at least one label, found none"),
        ("a.jsonl", '{"tokens": ["a"], "labels": ["O"]}', "expected at least two labels, found 'O' alone"),
        ("a.conll", "a O\n\nb\n", r"a\.conll:3: expected a word and its label, found 'b' alone"),
        ("a.csv", "a,O\n", "expected a .jsonl file, or CoNLL's columns"),
        ("a.conll", "a O\nlong-word B\n\nc O\n", r"a\.conll:1: expected at most 9 tokens, .* found 12: give more"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(name: str, content: str, message: str, tmp_path: Path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as told:
        read(tmp_path / name, max_tokens=9)
    assert "\n" not in str(told.value)


def test_a_label_that_training_lacks_is_told_with_its_place(tmp_path: Path):
    other = tmp_path / "test.conll"
    other.write_text("no O\n\nAda O\nLovelace PERSON\n")
    sources = {"train": [json_lines(tmp_path / "a.jsonl")], "test": [other]}
    with pytest.raises(
        ValueError, match=r"test\.conll:3: expected a label of training, NAME, O, PLACE, found 'PERSON'"
    ):
        labelled_words(sources, BytesTokenizer().encode, 257)


def test_rows_that_a_damaged_folder_may_have_are_refused():
    tokens, labels = [np.array([1, 2])], [np.array([0, 1])]
    for rows, message in (
        (AnsweredRows.of([], []), "train: expected at least one row"),
        (AnsweredRows.of(tokens, [np.array([0])]), "as many labels as tokens"),
        (AnsweredRows.of([np.array([], int)], [np.array([], int)]), "rows and answers of at least one token"),
    ):
        with pytest.raises(ValueError, match=message):
            SequenceAnswers({"train": rows}, 9, ["a", "b"])
    for ids, answer, message in (
        (tokens, [np.array([0, 2])], "expected answers of the task in row 0"),
        (tokens, [np.array([0, -1])], "expected answers of the task in row 0"),
        ([np.array([1, 9])], labels, "expected ids below 9 in row 0"),
    ):
        with pytest.raises(ValueError, match=message):
            SequenceAnswers({"train": AnsweredRows.of(ids, answer)}, 9, ["a", "b"]).row("train", 0)
    with pytest.raises(ValueError, match="expected a split of train, found 'test'"):
        SequenceAnswers({"train": AnsweredRows.of(tokens, labels)}, 9, ["a", "b"]).row("test", 0)
    with pytest.raises(ValueError, match="expected rows to train on, found none"):
        SequenceAnswers({"test": AnsweredRows.of(tokens, labels)}, 9, ["a", "b"])
