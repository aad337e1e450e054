"""Sources with the targets that are to be written, out of local files."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from polysketch.data.tokenization import BytesTokenizer
from polysketch.evaluation import measure_answers
from polysketch.generation import generate
from polysketch.models.answering import answering_config
from polysketch.tasks import AnsweredRows, SequenceAnswers, open_task, write_task
from polysketch.tasks.batch import BEGINNING
from polysketch.tasks.source_target import sequences_to_write

EXAMPLES = [("3 may 1999", "1999-05-03"), ("( 1 )", "1"), ("june", "06")]
END = BytesTokenizer().end_of_text


def json_lines(path: Path, examples=EXAMPLES, source: str = "source", target: str = "target") -> Path:
    content = "\n".join(json.dumps({source: one, target: two}) for one, two in examples)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


def read(*paths: Path, **options) -> SequenceAnswers:
    sources = dict(zip(("train", "test"), ([path] for path in paths), strict=False))
    return sequences_to_write(sources, BytesTokenizer().encode, 257, end=END, **options)


def texts(task: SequenceAnswers) -> list[tuple[bytes, bytes]]:
    """Sources and targets, of which every one ends."""
    rows = [task.row("train", index) for index in range(task.num_rows("train"))]
    assert all(row.answer[-1] == task.end for row in rows)
    return [(bytes(row.ids.tolist()), bytes(row.answer[:-1].tolist())) for row in rows]


def test_a_target_ends_and_is_written_token_by_token(tmp_path: Path):
    task = read(json_lines(tmp_path / "a.jsonl"))
    assert (task.asks, task.num_classes, task.longest, task.end) == ("written", 0, 11, END)
    assert texts(task) == [(one.encode(), two.encode()) for one, two in EXAMPLES]
    batch = task.rows("train", np.array([1, 2]))
    assert batch.inputs["source"].tolist() == [list(b"( 1 )"), [*b"june", 0]]
    assert batch.inputs["source_mask"].sum(1).tolist() == [5, 4]
    assert batch.inputs["ids"].tolist() == [[BEGINNING, *b"1", END], [BEGINNING, *b"06"]]
    assert batch.answers.tolist() == [[*b"1", END, -100], [*b"06", END]]


def test_layouts_of_one_content_give_the_same_rows(tmp_path: Path):
    named = json_lines(tmp_path / "a.jsonl.gz", source="question", target="answer")
    found = [read(named, source_field="question", target_field="answer")]
    lines = "".join(f"{one}\t{two}\n" for one, two in EXAMPLES)
    headed = f"Source\tTarget\n{lines}"
    for number, content in enumerate((lines, headed, f"\ufeff{headed}", lines.replace("\n", "\r\n"))):
        (tmp_path / f"{number}.tsv").write_text(content, "utf-8", newline="")
        found.append(read(tmp_path / f"{number}.tsv"))
    (tmp_path / "a.csv").write_text("source,target\n" + "".join(f'"{one}",{two}\n' for one, two in EXAMPLES))
    found.append(read(tmp_path / "a.csv"))
    assert [texts(task) for task in found] == [[(one.encode(), two.encode()) for one, two in EXAMPLES]] * 6


def test_cells_of_a_table_by_commas_may_hold_commas_quotes_and_lines(tmp_path: Path):
    file = tmp_path / "a.csv"
    file.write_text('target,source\n"one, ""two""",a\nb,"two\nlines"\n')
    assert texts(read(file)) == [(b"a", b'one, "two"'), (b"two\nlines", b"b")]
    file.write_text("source,target\n" + "long" * 50_000 + ",b\n")
    assert texts(read(file)) == [(b"long" * 50_000, b"b")]


def test_symbols_have_an_id_each_parentheses_too(tmp_path: Path):
    file = json_lines(tmp_path / "a.jsonl", [("( b )", "b a")])
    task = sequences_to_write({"train": [file]}, None)
    row = task.row("train", 0)
    assert (row.ids.tolist(), row.answer.tolist()) == ([1, 4, 2], [4, 3, BEGINNING])
    assert (task.vocab_size, task.alphabet, task.end) == (5, "symbols ( ) a b", BEGINNING)
    other = json_lines(tmp_path / "b.jsonl", [("a", "a"), ("a", "c")])
    with pytest.raises(ValueError, match=r"b\.jsonl:2: expected symbols that training has, \( \) a b, found 'c'"):
        sequences_to_write({"train": [file], "test": [other]}, None)


def test_they_come_back_from_their_folder(tmp_path: Path):
    task = read(*[json_lines(tmp_path / "a.jsonl")] * 2)
    write_task(task, tmp_path / "task", tokenizer=BytesTokenizer())
    found = open_task(tmp_path / "task")
    assert (found.options(), texts(found)) == (task.options(), texts(task))
    described = json.loads((tmp_path / "task" / "task.json").read_text())
    described["options"]["end"] = "x"
    (tmp_path / "task" / "task.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="expected the sizes of sequence-answers, found others: end is 'x'"):
        open_task(tmp_path / "task")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "train: expected at least one row, found none"),
        ("a.jsonl", '{"source": "a"}', r"a\.jsonl:1: expected an object with 'source' and 'target'"),
        ("a.jsonl", '{"source": "a", "target": 1}', r"a\.jsonl:1: expected two texts, found str and int"),
        ("a.tsv", "a\tb\na\tb\tc\n", r"a\.tsv:2: expected two columns apart by a tab, found 3"),
        ("a.tsv", "a\tb\na\t\n", r"a\.tsv:2: expected a text of at least one token"),
        ("a.xls", "a,b\n", "expected a .jsonl, .tsv or .csv file"),
        ("a.csv", "a,b\n", "a.csv:1: expected columns named 'source' and 'target', found 'a', 'b'"),
        ("a.csv", "source,target\none,two\none\n", "a.csv:3: expected 2 columns, found 1"),
        ("a.csv", 'source,target\none,two\n"one\n', "a.csv:3: expected a table whose quotes are closed"),
        ("a.tsv", "a\tlonger than that\n", r"a\.tsv:1: expected at most 9 tokens, .* found 16"),
        ("a.tsv", "longer than that\tb\n", r"a\.tsv:1: expected at most 9 tokens, .* found 16"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(name: str, content: str, message: str, tmp_path: Path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as told:
        read(tmp_path / name, max_tokens=9)
    assert "\n" not in str(told.value)


def test_a_row_counts_as_right_where_greedy_writing_gives_it(tmp_path: Path):
    """Though each token is asked for after the right ones: the first wrong one is wrong either way."""
    torch.manual_seed(0)
    model = answering_config("written", "tiny", vocab_size=9, num_layers=1).build().eval()
    sources = [torch.randint(1, 9, (5,)) for _ in range(6)]
    written = [
        generate(model.given(source[None]), [[BEGINNING]], max_new_tokens=4, temperature=0.0) for source in sources
    ]
    targets = [np.array(found.tokens[0]) for found in written]
    for each in targets[:2]:
        each[-1] = (each[-1] + 1) % 9
    task = SequenceAnswers({"train": AnsweredRows.of([source.numpy() for source in sources], targets)}, 9)
    found = measure_answers(model, [task.rows("train", np.arange(6))])
    assert (found.whole_rows, found.accuracy, found.answers) == (4 / 6, 22 / 24, 24)
