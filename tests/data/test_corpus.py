"""Sources are read in a fixed order, whole, and complain with the place of what is wrong."""

import gzip
import json
import os

import pytest

from polysketch.data import PreparedData, ReadOptions, prepare
from polysketch.data.corpus import Corpus, Selection
from polysketch.data.corpus.cutting import LONGEST_DOCUMENT, searched_for_line_end
from polysketch.data.splits import SplitRule, SplitTable


def read(*sources, options=None, table=None, **limits):
    names, selection = [str(source) for source in sources], Selection(**limits)
    return list(Corpus(names, options or ReadOptions(), SplitRule(), table=table, selection=selection).documents())


def texts_of(*sources, **keywords):
    return [document.text for document in read(*sources, **keywords)]


def test_a_folder_is_read_recursively_in_the_order_of_the_names(write_files):
    folder = write_files({"b.txt": "3", "a/z.py": "2", "a/b.md": "1", "c/d/e.txt": "4"})
    assert texts_of(folder) == ["1", "2", "3", "4"]


def test_hidden_files_caches_and_unknown_kinds_are_passed_over(write_files):
    folder = write_files({".git/a.txt": "x", ".b.txt": "x", "__pycache__/c.py": "x", "d.png": "x", "e.txt": "1"})
    assert texts_of(folder) == ["1"]


def test_all_kinds_of_files_are_read(write_files):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": "é4", "other": 1}, {"text": "5", "other": 2}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    folder = write_files(
        {
            "a.txt": "é1\r\n2",
            "b.txt.gz": gzip.compress("é3".encode()),
            "c.jsonl": lines + "\n\n",
            "d.jsonl.gz": gzip.compress(lines.encode()),
            "e.gz": gzip.compress(b"6"),
        }
    )
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "f.parquet")
    assert texts_of(folder) == ["é1\r\n2", "é3", "é4", "5", "é4", "5", "6", "é4", "5"]


def test_a_file_named_twice_is_read_once(write_files):
    folder = write_files({"a.txt": "1", "b.txt": "2"})
    assert texts_of(folder / "b.txt", folder, folder) == ["2", "1"]


def test_excluded_paths_are_left_out(write_files):
    folder = write_files({"a.txt": "1", "test/b.txt": "2", "x/test/c.txt": "3"})
    assert texts_of(folder, options=ReadOptions(exclude=("test/*", "*/test/*"))) == ["1"]


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
def test_cutting_text_loses_nothing_and_cuts_after_lines(write_files, size):
    text = "".join(f"line {number} é\n" for number in range(40)) + "the end"
    pieces = texts_of(write_files({"a.txt": text}), options=ReadOptions(cut_text=size))
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert len(pieces) >= len(text.encode()) // (size + 12)


@pytest.mark.parametrize("line", ["word " * 5000, "x" * 25_000, "é€😀" * 4000, "€" * 9000 + "\n" + "y" * 9000])
@pytest.mark.parametrize("size", [1, 100, 5000])
def test_text_without_line_ends_is_cut_too_and_no_character_is(write_files, size, line):
    pieces = texts_of(write_files({"a.txt": line}), options=ReadOptions(cut_text=size))
    assert "".join(pieces) == line
    assert len(pieces) > 1
    assert all(len(piece.encode()) <= size + searched_for_line_end(size) for piece in pieces)
    assert " " not in line or all(piece.endswith(" ") for piece in pieces)


@pytest.mark.parametrize("line", ["word " * 5000, "a\ttab " * 5000, "x" * 25_000, "é€😀" * 4000])
@pytest.mark.parametrize("size", [1, 99, 1000, 5000])
def test_pieces_of_a_long_line_are_as_long_as_asked(write_files, size, line):
    """But for the last one, which goes on to the end of the line."""
    pieces = texts_of(write_files({"a.txt": line + "\n"}), options=ReadOptions(cut_text=size))
    assert "".join(pieces) == line + "\n"
    assert {len(piece.encode()) for piece in pieces[:-1]} <= set(range(size, size + 6))


@pytest.mark.parametrize(("size", "line"), [(1, 400), (100, 500), (1000, 4900), (4096, 8100), (20_000, 39_000)])
def test_a_line_is_whole_up_to_some_times_the_length_asked_for(write_files, size, line):
    text = f"{'word ' * (line // 5 - 1)}end.\n" * 3
    assert len(texts_of(write_files({"a.txt": text}), options=ReadOptions(cut_text=size))) == 3


@pytest.mark.parametrize("encoding", ["gbk", "shift_jis", "big5", "utf-8", "latin-1"])
def test_no_character_of_another_encoding_is_cut(write_files, encoding):
    """Lines without an end or a space, of characters of one and of two bytes."""
    letters = {"latin-1": "aé", "shift_jis": "aア日本"}.get(encoding, "a日本")
    text = "".join(letters[number * number % 7 % len(letters)] for number in range(30_000))
    folder = write_files({"a.txt": text.encode(encoding)})
    pieces = texts_of(folder, options=ReadOptions(cut_text=101, encoding=encoding))
    assert "".join(pieces) == text
    assert len(pieces) > 3


@pytest.mark.parametrize(("files", "cut"), [(1, 100), (79, 790), (80, LONGEST_DOCUMENT)])
def test_few_files_are_cut_so_that_no_split_is_empty(write_files, files, cut):
    # 5 % of fewer than 80 files are fewer than 4; 5 % of the text in 20 documents of a split
    folder = write_files({f"{number}.txt": "two bytes\n" * 400 for number in range(files)})
    assert Corpus([str(folder)], ReadOptions(), SplitRule()).cut_text == cut


@pytest.mark.parametrize(
    ("files", "options", "limits"),
    [
        ({"train/a.txt": "x\n" * 999, "test/b.txt": "x\n" * 999}, {}, {}),
        ({"a.txt": "x\n" * 999, "b.jsonl": '{"text": "x"}\n' * 999}, {}, {}),
        ({"a.txt": "x\n" * 999}, {"cut_text": 0}, {}),
        ({"a.txt": "x\n" * 999}, {"encoding": "utf-16"}, {}),
        ({"a.txt": "x\n" * 999}, {}, {"max_documents": 1}),
    ],
)
def test_files_stay_whole_where_something_else_decides(write_files, files, options, limits):
    folder, limits = [str(write_files(files))], Selection(**limits)
    assert Corpus(folder, ReadOptions(**options), SplitRule(), selection=limits).cut_text in (0, LONGEST_DOCUMENT)
    assert Corpus(folder, ReadOptions(), SplitRule(0, 0)).cut_text == LONGEST_DOCUMENT


def test_another_text_field_can_be_named(write_files):
    folder = write_files({"a.jsonl": '{"body": "1"}\n'})
    assert texts_of(folder, options=ReadOptions(text_field="body")) == ["1"]


def test_another_encoding_can_be_named(write_files):
    folder = write_files({"a.txt": "é".encode("latin-1"), "b.jsonl": '{"text": "ü"}'.encode("latin-1")})
    documents = read(folder, options=ReadOptions(encoding="latin-1"))
    assert [(document.text, document.num_bytes) for document in documents] == [("é", 2), ("ü", 2)]


def test_empty_and_undecodable_documents_are_counted(write_files):
    folder = write_files(
        {
            "a.txt": b"\xff\xfe",
            "b.txt": "",
            "c.txt": "1",
            "d.jsonl": b'{"text": "\xff"}\n{"text": "\\ud800"}\n{"text": null}\n{"text": ""}\n{"text": "2"}\n',
        }
    )
    corpus = Corpus([str(folder)], ReadOptions(undecodable="skip"), SplitRule())
    for _ in range(2):  # a second pass counts afresh
        assert [document.text for document in corpus.documents()] == ["1", "2"]
        assert corpus.skipped == {"empty": 3, "undecodable": 3}


def test_undecodable_text_can_be_replaced(write_files):
    folder = write_files({"a.txt": b"1\xff2", "b.jsonl": b'{"text": "3\\ud8004"}\n{"text": "5\xff6"}\n'})
    assert texts_of(folder, options=ReadOptions(undecodable="replace")) == ["1\ufffd2", "3\ufffd4", "5\ufffd6"]


def test_reading_stops_at_the_wanted_amount_of_text(write_files):
    folder = write_files({f"{number}.txt": "x" * 10 for number in range(9)})
    assert len(read(folder, max_text_bytes=35)) == 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": b"ok \xff"}, r"a\.txt.*byte 3.*--encoding"),
        ({"a.jsonl": b'{"text": "ok"}\n{"text": "\xff"}\n'}, r"a\.jsonl:2.*--undecodable"),
        ({"a.jsonl": '{"text": "\\ud800"}\n'}, r"a\.jsonl:1.*surrogate"),
        ({"a.jsonl": '{"text": "ok"}\n{"text"\n'}, r"one JSON object a line.*a\.jsonl:2"),
        ({"a.jsonl": '{"body": "1", "id": 2}\n'}, r"field 'text'.*a\.jsonl:1.*body, id.*--text-field"),
        ({"a.jsonl": "[1]\n"}, r"a\.jsonl:1.*list"),
        ({"a.jsonl": "[" * 100_000 + "\n"}, r"one JSON object a line.*a\.jsonl:1"),
        ({"a.jsonl": '{"text": ' + "9" * 5000 + "}\n"}, r"one JSON object a line.*a\.jsonl:1"),
        ({"a.jsonl": '{"text": 3}\n'}, r"a\.jsonl:1.*int"),
        ({"a.txt.gz": gzip.compress(b"text" * 100)[:-9]}, r"gzip.*a\.txt\.gz"),
        ({"a.txt.gz": b"no gzip at all"}, r"gzip.*a\.txt\.gz"),
        ({"a.parquet": b"no parquet"}, r"Parquet.*a\.parquet"),
        ({"a.png": b"x"}, r"known kind.*none among 1 files"),
        ({"a.txt": b"", "b.txt": b""}, r"only 2 empty"),
    ],
)
def test_a_bad_file_is_named(write_files, files, message):
    with pytest.raises(ValueError, match=message):
        read(write_files(files))


def test_a_table_without_the_text_column_is_refused(write_files):
    pyarrow = pytest.importorskip("pyarrow")
    folder = write_files({"x": ""})
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"body": ["1"]}), folder / "a.parquet")
    with pytest.raises(ValueError, match=r"field 'text'.*a\.parquet.*body"):
        read(folder)


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read(tmp_path / "nowhere")


def test_no_source_at_all_is_refused():
    with pytest.raises(ValueError, match="at least one source"):
        read()


@pytest.mark.parametrize(("name", "message"), [("a.txt", "empty file"), ("a.png", "known kind")])
def test_a_named_file_that_cannot_be_read_is_refused(write_files, name, message):
    with pytest.raises(ValueError, match=message):
        read(write_files({name: b""}) / name)


@pytest.mark.parametrize(
    "options",
    [
        {"undecodable": "ignore"},
        {"cut_text": -1},
        {"encoding": "martian"},
        {"encoding": "undefined"},
        {"encoding": "utf-16", "cut_text": 100},
    ],
)
def test_an_option_without_meaning_is_refused(options):
    with pytest.raises(ValueError, match="expected"):
        ReadOptions(**options)


def test_split_subfolders_are_honoured(write_files):
    folder = write_files({"train/a.txt": "1", "train/x/b.txt": "2", "dev/c.txt": "3", "test/d.txt": "4"})
    assert {document.text: document.split for document in read(folder)} == {
        "1": "train",
        "2": "train",
        "3": "validation",
        "4": "test",
    }


def test_a_folder_called_test_alone_is_no_split(write_files):
    folder = write_files({f"test/{number}.py": str(number) for number in range(60)})
    assert {document.split for document in read(folder)} == {"train", "validation", "test"}


def test_a_file_outside_the_split_subfolders_is_refused_unless_excluded(write_files):
    folder = write_files({"train/a.txt": "1", "test/b.txt": "2", "README.md": "3"})
    with pytest.raises(ValueError, match=r"README\.md outside.*--exclude"):
        read(folder)
    assert texts_of(folder, options=ReadOptions(exclude=("README.md",))) == ["2", "1"]


def test_a_table_gives_the_split_of_files(write_files):
    folder = write_files(
        {
            "books/a.txt": "1",
            "books/b.txt": "2",
            "else/c.txt": "3",
            "t.tsv": "id\tsplit\tfile\n1\ttest\tbooks/a.txt\n2\ttrain\tbooks/b.txt\n3\tvalid\tc.txt\n4\ttrain\tgone\n",
        }
    )
    found = read(folder, table=SplitTable(folder / "t.tsv"))
    assert [document.split for document in found] == ["test", "train", "validation"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("file\tsplit\nb.txt\ttrain\n", r"a\.txt missing"),
        ("file\tsplit\na.txt\tholdout\n", "found 'holdout'"),
        ("name\tsplit\na.txt\ttrain\n", "columns file and split.*name, split"),
        ("", "empty file"),
        ("split\tfile\ntrain\n", r"table\.tsv:2: expected a file and its split"),
        ("file\tsplit\nx/a.txt\ttrain\ny/a.txt\ttest\n", r"a\.txt missing"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(write_files, table, message):
    folder = write_files({"a.txt": "1", "table.tsv": table})
    with pytest.raises(ValueError, match=message):
        read(folder / "a.txt", table=SplitTable(folder / "table.tsv"))


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        SplitTable(tmp_path / "nowhere.tsv")


def test_the_hash_split_depends_on_seed_and_text_alone():
    rule, other = SplitRule(0.2, 0.1, seed=1), SplitRule(0.2, 0.1, seed=2)
    texts = [f"text {number}" for number in range(4000)]
    splits = [rule.split_of(text) for text in texts]
    assert splits == [rule.split_of(text) for text in texts]
    assert splits != [other.split_of(text) for text in texts]
    assert splits.count("validation") / 4000 == pytest.approx(0.2, abs=0.03)
    assert splits.count("test") / 4000 == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("shares", [(-0.1, 0.1), (0.5, 0.5), (1.0, 0.0), (float("nan"), 0.1)])
def test_shares_that_leave_no_training_are_refused(shares):
    with pytest.raises(ValueError, match="shares"):
        SplitRule(*shares)


def test_a_dataset_of_the_datasets_library_is_streamed_with_its_splits(write_files, monkeypatch, tmp_path):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = write_files(
        {
            "train.jsonl": '{"text": "1", "body": "a"}\n{"text": "2", "body": "b"}\n',
            "test.jsonl": '{"text": "3", "body": "c"}\n',
        }
    )
    found = read(f"hf:{folder}")
    assert [(document.text, document.split) for document in found] == [("1", "train"), ("2", "train"), ("3", "test")]
    assert texts_of(f"hf:{folder}:default", options=ReadOptions(text_field="body")) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="field 'words'"):
        read(f"hf:{folder}", options=ReadOptions(text_field="words"))
    with pytest.raises(FileNotFoundError):
        read(f"hf:{tmp_path / 'nowhere'}")


def test_a_dataset_without_splits_is_split_by_hash(write_files):
    pytest.importorskip("datasets")
    folder = write_files({"rows.jsonl": "".join(f'{{"text": "row {number}"}}\n' for number in range(100))})
    assert {document.split for document in read(f"hf:{folder}")} == {"train", "validation", "test"}


def test_a_dataset_needs_a_name():
    with pytest.raises(ValueError, match="hf:NAME"):
        read("hf:")


def test_an_empty_name_is_not_the_current_folder():
    """`prepare "$TEXT"` with TEXT unset must not read whatever lies about."""
    with pytest.raises(ValueError, match="found an empty name"):
        read("")


@pytest.mark.parametrize(("amount", "message"), [(0, "at least 1"), (-1, "at least 1"), (9, r"found 9.*has 10 bytes")])
def test_an_amount_of_text_that_holds_no_document_is_refused(write_files, amount, message):
    with pytest.raises(ValueError, match=f"max_text_bytes.*{message}"):
        read(write_files({"a.txt": "x" * 10}), max_text_bytes=amount)


def test_a_table_and_files_with_a_byte_order_mark_are_read_without_it(write_files):
    folder = write_files({"a.txt": "\ufeffone", "b.jsonl": '\ufeff{"text": "two"}\n', "t.tsv": "\ufefffile\tsplit\n"})
    with (folder / "t.tsv").open("a") as table:
        table.write("a.txt\ttrain\nb.jsonl\ttest\n")
    found = read(folder, table=SplitTable(folder / "t.tsv"))
    assert [(document.text, document.split) for document in found] == [("one", "train"), ("two", "test")]
    assert texts_of(folder / "a.txt", options=ReadOptions(cut_text=2))[0] == "one"
    assert texts_of(folder / "a.txt", options=ReadOptions(encoding="latin-1"))[0].endswith("one")


def test_json_lines_whose_ends_are_no_single_bytes_are_refused(write_files):
    folder = write_files({"a.jsonl": ""})
    (folder / "a.jsonl").write_bytes('{"text": "one"}\n'.encode("utf-16"))
    with pytest.raises(
        ValueError, match=r"line ends are single bytes, found utf-16 for .*a\.jsonl: write them in UTF-8"
    ):
        read(folder, options=ReadOptions(encoding="utf-16"))


def test_links_to_folders_are_followed_and_never_round_and_round(write_files, tmp_path):
    folder = write_files({"d/train/a.txt": "1", "real/b.txt": "2", "real/deep/c.txt": "3"})
    (folder / "d" / "test").symlink_to(folder / "real")
    (folder / "real" / "up").symlink_to(folder / "d")
    (folder / "real" / "deep" / "itself").symlink_to(folder / "real")
    (folder / "d" / "train" / "above").symlink_to(folder)
    found = read(folder / "d")
    assert sorted((document.text, document.split) for document in found) == [
        ("1", "train"),
        ("2", "test"),
        ("3", "test"),
    ]


def test_a_name_that_is_no_utf8_is_read(write_files):
    folder = write_files({"a.txt": "one"})
    with open(os.fsencode(folder) + b"/caf\xe9.txt", "w") as file:
        file.write("two")
    prepare([folder], "bytes", folder / "out", validation_share=0, test_share=0, progress=False)
    assert PreparedData.open(folder / "out").split("train").num_documents == 2


def test_a_table_that_is_no_text_is_named(tmp_path):
    (tmp_path / "table.tsv").write_bytes(b"file\tsplit\n\xff\xfe\x00\n")
    with pytest.raises(ValueError, match=r"expected a table of UTF-8 text in .*table\.tsv"):
        SplitTable(tmp_path / "table.tsv")


def test_a_seed_longer_than_the_key_of_the_hash_is_refused():
    with pytest.raises(ValueError, match="at most 64 digits"):
        SplitRule(seed=10**64)


@pytest.mark.parametrize("second", ["train", "test"])
def test_a_table_that_lists_a_file_twice_is_refused(tmp_path, second):
    """By the same name, or by another way to it."""
    (tmp_path / "table.tsv").write_text(f"file\tsplit\nb.txt\ttest\na.txt\ttrain\n./a.txt\t{second}\n")
    with pytest.raises(ValueError, match=rf"every file once .*, found \./a\.txt twice: train and {second}"):
        SplitTable(tmp_path / "table.tsv")
