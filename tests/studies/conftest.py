"""Texts for studies: books of a few words where POLYSKETCH_DATA names a folder of them."""

import gzip
import random
from pathlib import Path

import pytest

from polysketch.data import PreparedData, prepare

WORDS = ("whale", "ship", "sea", "captain", "harpoon", "self", "value", "key")


def text_of(number: int, lines: int) -> str:
    """Lines of words in random order."""
    words = random.Random(number)
    return "\n".join(" ".join(words.choice(WORDS) for _ in range(10)) for _ in range(lines))


@pytest.fixture
def books(tmp_path, monkeypatch) -> Path:
    """A folder with a book in each split, in the place of the real ones."""
    folder = tmp_path / "data" / "books"
    folder.mkdir(parents=True)
    table = ["file\tsplit"]
    for number, split in enumerate(("train", "validation", "test")):
        (folder / f"{split}.txt.gz").write_bytes(gzip.compress(text_of(number, 200).encode()))
        table.append(f"{split}.txt.gz\t{split}")
    (folder / "books.tsv").write_text("\n".join(table) + "\n", encoding="utf-8")
    monkeypatch.setenv("POLYSKETCH_DATA", str(folder.parent))
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where studies keep their things."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> PreparedData:
    """Words in random order, prepared as bytes."""
    folder = tmp_path_factory.mktemp("words")
    for number, split in enumerate(("train", "validation", "test")):
        (folder / "text" / split).mkdir(parents=True)
        (folder / "text" / split / "words.txt").write_text(text_of(number, 40), encoding="utf-8")
    return prepare([folder / "text"], "bytes", folder / "prepared", progress=False)
