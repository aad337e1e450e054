"""``polysketch prepare`` makes a folder and says what is in it."""

import io
import json
import shlex

import pytest

from polysketch.data import PreparedData

tyro = pytest.importorskip("tyro")

from polysketch.cli.prepare import PrepareFlags, run  # noqa: E402 - needs tyro

SHARES = ("--validation-share", "0.2", "--test-share", "0.2")


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"the text of document {number}\n" * 5)
    (folder / "empty.txt").touch()
    return folder


def parse(*arguments: object) -> PrepareFlags:
    return tyro.cli(PrepareFlags, args=[str(argument) for argument in arguments])


def test_a_folder_is_prepared_and_summarised(sources, tmp_path, capsys):
    flags = parse(
        *(sources, "--tokenizer", "bpe:300", "--out", tmp_path / "out", "--no-progress", "--json"),
        *SHARES,
    )
    assert run(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    description = PreparedData.open(tmp_path / "out").description
    summary = json.loads(lines[-1])
    assert summary["splits"]["train"]["tokens"] == description.splits["train"].tokens
    for name, split in description.splits.items():
        (row,) = [line.split() for line in lines if line.startswith(name)]
        assert row[1:3] == [str(split.documents), f"{split.tokens:,}"]
        assert float(row[4]) == pytest.approx(split.bytes / split.tokens, abs=0.001)
    assert "left out: 1 empty documents" in lines


def test_every_flag_reaches_the_library(sources, tmp_path):
    (tmp_path / "table.tsv").write_text(
        "file\tsplit\n" + "".join(f"{number}.txt\t{'test' if number % 3 else 'train'}\n" for number in range(20))
    )
    flags = parse(
        *(sources, "--out", tmp_path / "out", "--no-progress", "--split-table", tmp_path / "table.tsv"),
        *("--validation-share", "0", "--exclude", "2?.txt", "3?.txt", "empty.txt", "--cut-text", "40", "--seed", "7"),
    )
    run(flags)
    description = PreparedData.open(tmp_path / "out").description
    assert set(description.splits) == {"train", "test"}
    assert description.splits["train"].documents > 7
    assert description.seed == 7


@pytest.mark.parametrize(
    ("shares", "ending"),
    [
        (SHARES, []),
        (("--validation-share", "0.2", "--test-share", "0"), []),
        (("--validation-share", "0", "--test-share", "0"), ["--eval-every", "0"]),
    ],
)
def test_the_next_command_finds_all_that_it_reads(sources, tmp_path, capsys, shares, ending):
    """Training evaluates on the validation split unless it is told not to."""
    out = tmp_path / "out"
    run(parse(sources, "--out", out, "--no-progress", *shares))
    line = capsys.readouterr().out.splitlines()[-1]
    expected = ["train", "--data", str(out), "--preset", "tiny", "--out", "runs/out", *ending]
    assert shlex.split(line) == ["next:", "polysketch", *expected]


def test_nothing_is_next_where_there_is_nothing_to_train_on(sources, tmp_path, capsys):
    run(parse(sources, "--out", tmp_path / "out", "--no-progress", "--splits", "test", *SHARES))
    assert capsys.readouterr().out.splitlines()[-1] == f"prepared {tmp_path / 'out'}"


def test_a_normalising_tokenizer_is_pointed_out(sources, tmp_path, capsys):
    run(parse(sources, "--tokenizer", "bpe:300", "--out", tmp_path / "a", "--no-progress", *SHARES))
    contents = json.loads((tmp_path / "a" / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents | {"normalizer": {"type": "NFC"}}))
    run(parse(sources, "--tokenizer", tmp_path / "tokenizer.json", "--out", tmp_path / "b", "--no-progress", *SHARES))
    first, second = capsys.readouterr().out.split("prepared")[:2]
    assert "does not keep all text" not in first
    assert "does not keep all text" in second


@pytest.mark.parametrize("arguments", [["--out"], ["a.txt", "--out", "b", "--undecodable", "ignore"]])
def test_a_command_line_that_makes_no_sense_is_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2


def test_names_that_are_no_text_are_told_by_their_bytes(tmp_path, monkeypatch):
    """Standard output is strict in most locales."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for number in range(100):
        (folder / f"{number}.txt").write_text(f"the text of document {number}\n" * 5)
    (folder / "z\udce9.txt").write_text("the text of document 7\n" * 5)
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict")
    monkeypatch.setattr("sys.stdout", out)
    assert run(parse(folder, "--out", tmp_path / "out", "--no-progress", *SHARES)) == 0
    out.flush()
    assert rb"z\udce9.txt" in out.buffer.getvalue()
