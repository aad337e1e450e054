"""Tables in text, standard input, what files are said to hold, damaged lines, and texts that come twice."""

import gzip
import io
import json
import subprocess
import sys

import pytest

from polysketch.cli import main
from polysketch.data import PreparedData, prepare, unfinished
from polysketch.data.corpus import Corpus, ReadOptions
from polysketch.data.splits import SplitRule
from polysketch.storage import disk

TEXTS = ["plain", 'with "quotes", and a comma', "two\nlines", "a\ttab", "größer", "=1+1"]


def read(*sources, **options) -> list[str]:
    corpus = Corpus([str(source) for source in sources], ReadOptions(**options), SplitRule())
    return [document.text for document in corpus.documents()]


def write_table(path, between: str, *, newline: str = "\n", start: str = "", texts=TEXTS) -> None:
    rows = [f"id{between}text{between}note"]
    rows += [f'{number}{between}"{text.replace(chr(34), chr(34) * 2)}"{between}x' for number, text in enumerate(texts)]
    contents = (start + newline.join(rows) + newline).encode()
    path.write_bytes(gzip.compress(contents) if path.name.endswith(".gz") else contents)


@pytest.mark.parametrize(("name", "between"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")])
@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_rows_of_a_table_are_documents(tmp_path, name, between, start, newline):
    write_table(tmp_path / name, between, start=start, newline=newline)
    assert read(tmp_path / name) == TEXTS
    assert read(tmp_path) == TEXTS
    assert read(tmp_path / name, text_field="note") == ["x"] * len(TEXTS)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("id,words\n1,a\n", r"expected a field 'text' in .*a.csv, found the fields id, words: name .* --text-field"),
        ("text,note\na,b\nc\n", r"expected 2 columns at .*a.csv:3, found 1"),
        ("text,note\na,b\nc,d,e\n", r"expected 2 columns at .*a.csv:3, found 3"),
        ('text,note\na,b\n"c,d\n', r"expected a table whose quotes are closed, found another at .*a.csv:3"),
        ('text,note\n"a"b,c\n', r"whose quotes are closed, found another at .*a.csv:2"),
        ("\n\n", r"expected a field 'text' in .*a.csv, found the fields : "),
    ],
)
def test_what_is_no_table_is_refused_with_its_place(tmp_path, contents, message):
    (tmp_path / "a.csv").write_text(contents)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.csv")


def test_undecodable_rows_follow_the_rule_of_documents(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text\ngood\nb\xffd\nlast\n")
    with pytest.raises(ValueError, match=r"expected text in utf-8, found other bytes in .*a.csv:3"):
        read(tmp_path / "a.csv")
    assert read(tmp_path / "a.csv", undecodable="skip") == ["good", "last"]
    assert read(tmp_path / "a.csv", undecodable="replace") == ["good", "b\ufffdd", "last"]
    (tmp_path / "b.csv").write_bytes("text\ngrößer\n".encode("latin-1"))
    assert read(tmp_path / "b.csv", encoding="latin-1") == ["größer"]


@pytest.mark.parametrize(
    ("contents", "hint"),
    [
        (gzip.compress(b"a text", mtime=0), "it begins like a gzip file, whose name has to end in .gz; otherwise give"),
        (b"PK\x03\x04\xff\xff", "it begins like a zip archive, which has to be unpacked first; otherwise give"),
        (b"%PDF-1.7\n\xe2\xe3", "it begins like a PDF, whose text has to be taken out first; otherwise give"),
        ("größer".encode("utf-16"), "it begins like UTF-16; give the right --encoding"),
        ("größer".encode("latin-1"), "give the right --encoding"),
    ],
)
def test_a_file_that_is_no_text_is_known_by_its_first_bytes(tmp_path, contents, hint):
    (tmp_path / "a.txt").write_bytes(contents)
    with pytest.raises(ValueError, match=rf"found other bytes in .*a\.txt: [\w' ]+(in \w+ )?at byte \d+: {hint}"):
        read(tmp_path / "a.txt")


def test_what_files_hold_can_be_said(tmp_path):
    (tmp_path / "a.data").write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(ValueError, match=r"expected a file of a known kind .* --format says what it holds"):
        read(tmp_path / "a.data")
    assert read(tmp_path / "a.data", format="jsonl") == ["one", "two"]
    assert read(tmp_path, format="jsonl") == ["one", "two"]
    assert len(read(tmp_path / "a.data", format="text", cut_text=0)) == 1
    with pytest.raises(ValueError, match="expected format of auto, text, jsonl, csv, tsv, parquet, found 'xml'"):
        ReadOptions(format="xml")


BAD_LINES = [
    b'{"text": "first"}',
    b'{"text": 3}',
    b"{",
    b'{"words": "x"}',
    b"[" * 10_000,
    b'{"text": "' + b"x" * 200 + b'"}',
    b"7",
    b'{"text": "last"}',
]


def test_damaged_lines_are_left_out_and_counted_where_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("polysketch.data.corpus.readers.LONGEST_LINE", 100)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(BAD_LINES) + b"\n")
    with pytest.raises(ValueError, match=r"expected text in the field 'text' of .*a.jsonl:2, found int"):
        read(tmp_path / "a.jsonl")
    corpus = Corpus([str(tmp_path / "a.jsonl")], ReadOptions(damaged="skip"), SplitRule())
    assert [document.text for document in corpus.documents()] == ["first", "last"]
    assert corpus.skipped == {"damaged": 6}
    assert [reason.rpartition("a.jsonl:")[2].split(",")[0].split(":")[0] for reason in corpus.damages] == list("23456")


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_rows_behind_a_line_that_is_too_long_are_read(tmp_path, monkeypatch, end):
    monkeypatch.setattr("polysketch.data.corpus.readers.LONGEST_LINE", 20)
    (tmp_path / "a.csv").write_bytes(end.join([b"text", b"a", b"x" * 300, b"b", b'"two', b'lines"', b"c", b""]))
    with pytest.raises(ValueError, match=r"lines of at most 20 letters, found a longer one at .*a.csv:3"):
        read(tmp_path / "a.csv")
    corpus = Corpus([str(tmp_path / "a.csv")], ReadOptions(damaged="skip"), SplitRule())
    texts = [document.text for document in corpus.documents()]
    assert [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts] == ["a", "b", "two\nlines", "c"]
    assert corpus.skipped == {"damaged": 1}
    (tmp_path / "b.csv").write_bytes(end.join([b"text", b"x" * 300, b"b,c", b"d", b""]))
    corpus = Corpus([str(tmp_path / "b.csv")], ReadOptions(damaged="skip"), SplitRule())
    assert [document.text for document in corpus.documents()] == ["d"]
    assert [int(reason.split("b.csv:")[1].split(",")[0]) for reason in corpus.damages] == [2, 3]


def test_a_damaged_page_is_told_with_its_file(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    texts = [f"{number} {number * number} words of a text" for number in range(2000)]
    parquet.write_table(arrow.table({"text": texts}), path, compression="snappy", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[1000:1060] = b"\xff" * 60
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected a Parquet file, found a damaged one: .*a.parquet"):
        read(path)


def test_damaged_rows_of_tables_are_left_out_where_asked(tmp_path):
    (tmp_path / "a.csv").write_text('text,note\na,b\nc\n"d"e,f\ng,h\n')
    assert read(tmp_path / "a.csv", damaged="skip") == ["a", "g"]
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"text": [1, 2]}), tmp_path / "b.parquet")
    corpus = Corpus([str(tmp_path)], ReadOptions(damaged="skip"), SplitRule())
    assert [document.text for document in corpus.documents()] == ["a", "g"]
    assert corpus.skipped == {"damaged": 4}


# The same text twice


@pytest.fixture
def copies(tmp_path):
    folder = tmp_path / "copies"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"text {number % 40} " * 30)
    return folder


SETTINGS = {
    "tokenizer": "bytes",
    "validation_share": 0.2,
    "test_share": 0.2,
    "progress": False,
    "options": ReadOptions(deduplicate=True),
}


def contents_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_identical_documents_are_named_or_left_out(copies, tmp_path, capsys):
    arguments = ["prepare", str(copies), "--cut-text", "0", "--no-progress"]
    assert main([*arguments, "--out", str(tmp_path / "all")]) == 0
    shown = capsys.readouterr().out
    assert f"identical to earlier documents: {copies / '40.txt'}, {copies / '41.txt'}, " in shown
    assert "--deduplicate leaves such out" in shown
    assert main([*arguments, "--out", str(tmp_path / "once"), "--deduplicate"]) == 0
    assert "left out: 20 identical documents" in capsys.readouterr().out
    counted = [
        sum(split.documents for split in PreparedData.open(tmp_path / name).description.splits.values())
        for name in ("all", "once")
    ]
    assert counted == [60, 40]


@pytest.mark.parametrize("call", [20, 40, 55])
def test_after_a_kill_copies_of_what_was_read_before_are_left_out_too(copies, tmp_path, monkeypatch, call):
    """The same bytes as of a preparation that was left alone."""
    alone = contents_of(prepare(copies, out=tmp_path / "alone", **SETTINGS).folder)
    monkeypatch.setattr(unfinished, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr("polysketch.data.encoding.BATCH_BYTES", 700)
    sync, calls = disk.sync, iter(range(10**6))

    class Fault(BaseException):
        pass

    def failing(*arguments):
        if next(calls) == call:
            raise Fault
        return sync(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "sync", failing)
        with pytest.raises(Fault):
            prepare(copies, out=tmp_path / "out", **SETTINGS)
    record = json.loads((tmp_path / "out.partial" / unfinished.RECORD_FILE).read_text())
    assert 0 < record["place"]["part"] < 59
    assert contents_of(prepare(copies, out=tmp_path / "out", **SETTINGS).folder) == alone


# Standard input


def test_standard_input_is_a_source(tmp_path, monkeypatch, capsys):
    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    text = "".join(f"line {number} of it\n" for number in range(900))
    (tmp_path / "same.txt").write_text(text)
    flags = ["--tokenizer", "bytes", "--no-progress"]
    give(text)
    assert main(["prepare", "-", "--out", str(tmp_path / "new" / "piped"), *flags]) == 0
    assert main(["prepare", str(tmp_path / "same.txt"), "--out", str(tmp_path / "file"), *flags]) == 0
    piped, file = (contents_of(tmp_path / name) for name in ("new/piped", "file"))
    assert piped["train.bin"] == file["train.bin"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["piped"]
    give('{"text": "one"}\n' * 3 + "{\n")
    assert main(["prepare", "-", "--out", str(tmp_path / "lines"), "--format", "jsonl", *flags]) == 1
    assert "lines.stdin.jsonl:4" in capsys.readouterr().err


def test_given_again_after_a_failure_the_same_text_is_the_same_file(tmp_path):
    command = [sys.executable, "-m", "polysketch", "prepare", "-", "--out", "out", "--format", "jsonl", "--no-progress"]

    def run(text: str, *more: str):
        return subprocess.run([*command, *more], input=text, capture_output=True, text=True, cwd=tmp_path, check=False)

    assert run('{"text": "a"}\n{\n').returncode == 1
    before = (tmp_path / "out.stdin.jsonl").stat().st_mtime_ns
    assert run('{"text": "a"}\n{\n').returncode == 1
    assert (tmp_path / "out.stdin.jsonl").stat().st_mtime_ns == before
    assert run('{"text": "b"}\n{\n').returncode == 1
    assert (tmp_path / "out.stdin.jsonl").stat().st_mtime_ns != before
    assert sorted(path.name for path in tmp_path.iterdir()) in (["out.stdin.jsonl"], ["out.partial", "out.stdin.jsonl"])
