"""Folders that nobody named have the names of their sources."""

from pathlib import Path

import pytest

from polysketch.cli import main
from polysketch.cli.usual_folders import prepared_folder, run_folder


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("my book.txt", "data/my book"),
        ("corpus.jsonl.gz", "data/corpus"),
        ("folder/texts", "data/texts"),
        ("folder/", "data/folder"),
        (".hidden", "data/.hidden"),
        ("pg19", "data/pg19"),
        ("hf:allenai/c4:en", "data/allenai-c4-en"),
    ],
)
def test_a_source_gives_its_name(source, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder" / "texts").mkdir(parents=True)
    for name in ("my book.txt", "corpus.jsonl.gz", ".hidden"):
        (tmp_path / name).touch()
    assert prepared_folder([source]) == Path(expected)


def test_no_source_is_asked_for():
    with pytest.raises(ValueError, match="expected a SOURCE"):
        prepared_folder([])


@pytest.mark.parametrize("sources", [["a.txt", "b.txt"], ["-"]])
def test_several_sources_and_standard_input_have_no_name(sources):
    with pytest.raises(ValueError, match="expected --out, the folder to make"):
        prepared_folder(sources)


def test_a_run_has_the_name_of_its_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_folder(Path("data/books/")) == Path("runs/books")


def test_a_book_is_prepared_trained_on_and_gone_on_with_without_a_folder_named(tmp_path, monkeypatch, capsys):
    """The same command with --resume, as the command itself says."""
    monkeypatch.chdir(tmp_path)
    lines = [f"Line {number} of a book, and another one.\n" for number in range(2000)]
    (tmp_path / "my book.txt").write_text("".join(lines))
    train = ["train", "--data", "data/my book", "--attention", "softmax", "--layers", "1"]
    train += ["--context", "16", "--batch-size", "2", "--save-every", "1"]
    assert main(["prepare", "my book.txt"]) == 0
    assert "next: polysketch train --data 'data/my book'" in capsys.readouterr().out
    assert main([*train, "--steps", "2"]) == 0
    assert (tmp_path / "runs" / "my book" / "config.json").is_file()
    assert main([*train, "--steps", "2"]) == 1
    assert "already holds a run: give --resume" in capsys.readouterr().err
    assert main(["train", "--data", "data/my book", "--resume", "--steps", "3", "--extend"]) == 0
    assert "finished: 3 steps" in capsys.readouterr().err
