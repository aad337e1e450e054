"""Small corpora and tokenizers, made once."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from polysketch.data.tokenization import BpeTokenizer, BytesTokenizer, SentencePieceTokenizer, TokenizerLike
from polysketch.progress import Progress

WORDS = "the,a,of,and,state,chunk,sketch,query,key,value,naïve,Ωmega,日本語,x+1,def,return,\t,...,😀"


def make_text(number: int, num_words: int = 120) -> str:
    """Some lines of words, another text for each number."""
    source = random.Random(number)
    vocabulary = WORDS.split(",")
    words = [source.choice(vocabulary) for _ in range(num_words)]
    lines = [" ".join(words[start : start + 9]) for start in range(0, num_words, 9)]
    return "\n".join([f"document {number}", *lines, ""])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is shown at once, and each time that it is told."""
    monkeypatch.setitem(Progress.__init__.__kwdefaults__, "quiet_seconds", 0.0)
    monkeypatch.setattr("polysketch.progress._SECONDS_BETWEEN", {True: 0.0, False: 0.0})


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [make_text(number) for number in range(60)]


@pytest.fixture(scope="session")
def tokenizers(texts: list[str]) -> dict[str, TokenizerLike]:
    """One tokenizer of each kind, trained on the texts where it is trained."""
    return {
        "bytes": BytesTokenizer(),
        "bpe": BpeTokenizer.train(texts, 400),
        "sentencepiece": SentencePieceTokenizer.train(texts, 330),
    }


@pytest.fixture
def corpus_folder(tmp_path: Path, texts: list[str]) -> Path:
    """A folder of 60 text files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text.encode())
    return folder


@pytest.fixture
def write_files(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes files below a new folder and returns the folder."""

    def write(files: dict[str, bytes | str], name: str = "files") -> Path:
        for relative, contents in files.items():
            path = tmp_path / name / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
        return tmp_path / name

    return write
