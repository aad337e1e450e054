"""A prepared folder holds its documents, depends on nothing but its sources and arguments, and is whole or absent."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from polysketch.data import DataDescription, PreparedData, ReadOptions, TrainingWindows, encoding, prepare, unfinished
from polysketch.data.tokenization import BpeTokenizer
from polysketch.data.writer import SplitWriter, token_dtype
from polysketch.storage import disk, folders, whole_folder

SHARES = {"validation_share": 0.2, "test_share": 0.2, "progress": False}


def documents_of(data: PreparedData, split: str) -> list[str]:
    """The texts between the ends of text."""
    tokens = data.split(split).tokens
    ends = np.flatnonzero(tokens == data.tokenizer.end_of_text)
    assert ends[-1] == len(tokens) - 1
    return [data.tokenizer.decode(piece) for piece in np.split(tokens, ends + 1)[:-1] if len(piece)]


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def prepared(corpus_folder: Path, tmp_path: Path) -> PreparedData:
    return prepare(corpus_folder, "bytes", tmp_path / "out", **SHARES)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400", "sentencepiece:330"])
def test_every_document_is_kept_in_exactly_one_split(corpus_folder, tmp_path, texts, tokenizer):
    data = prepare(corpus_folder, tokenizer, tmp_path / "out", **SHARES)
    kept = [text for name in data.description.splits for text in documents_of(data, name)]
    assert sorted(kept) == sorted(texts)
    assert set(data.description.splits) == {"train", "validation", "test"}
    data.verify()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400", "sentencepiece:330"])
def test_the_description_counts_what_the_files_hold(corpus_folder, tmp_path, tokenizer):
    data = prepare(corpus_folder, tokenizer, tmp_path / "out", **SHARES)
    counts = data.tokenizer.token_bytes()
    assert data.description.vocab_size == data.tokenizer.vocab_size == len(counts)
    for name in data.description.splits:
        split = data.split(name)
        assert split.num_tokens == len(split.tokens)
        assert split.num_documents == (split.tokens == data.description.end_of_text).sum()
        assert split.num_bytes == counts[split.tokens].sum()
        assert split.num_bytes == sum(len(text.encode()) for text in documents_of(data, name))
        assert split.tokens.dtype == np.uint16
        assert not split.tokens.flags.writeable


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400", "sentencepiece:330"])
def test_preparing_twice_gives_the_same_files(corpus_folder, tmp_path, tokenizer):
    prepare(corpus_folder, tokenizer, tmp_path / "a", **SHARES)
    prepare(corpus_folder, tokenizer, tmp_path / "b", **SHARES)
    assert contents_of(tmp_path / "a") == contents_of(tmp_path / "b")


def test_the_size_of_a_batch_changes_nothing(corpus_folder, tmp_path, monkeypatch):
    prepare(corpus_folder, "bpe:400", tmp_path / "a", **SHARES)
    monkeypatch.setattr(encoding, "BATCH_BYTES", 1000)
    prepare(corpus_folder, "bpe:400", tmp_path / "b", **SHARES)
    assert contents_of(tmp_path / "a") == contents_of(tmp_path / "b")


def test_a_trained_tokenizer_sees_the_training_split_alone(corpus_folder, tmp_path):
    data = prepare(corpus_folder, "bpe:400", tmp_path / "out", **SHARES)
    again = BpeTokenizer.train(documents_of(data, "train"), 400)
    assert again.sha256 == data.tokenizer.sha256


def test_a_tokenizer_trains_on_no_more_text_than_wanted(corpus_folder, tmp_path):
    data = prepare(corpus_folder, "bpe:400", tmp_path / "out", tokenizer_text_bytes=1000, **SHARES)
    train = documents_of(data, "train")
    assert len(train[0].encode()) < 1000 <= len((train[0] + train[1]).encode())
    assert BpeTokenizer.train(train[:2], 400).sha256 == data.tokenizer.sha256


def test_a_folder_lends_its_tokenizer(corpus_folder, write_files, tmp_path):
    first = prepare(corpus_folder, "bpe:400", tmp_path / "a", **SHARES)
    other = write_files({f"{number}.txt": f"other {number}" for number in range(60)})
    for place in ("a", "a/tokenizer.json"):
        second = prepare(other, str(tmp_path / place), tmp_path / place.replace("/", "-") / "b", **SHARES)
        assert second.tokenizer.sha256 == first.tokenizer.sha256


def test_more_than_65536_ids_take_four_bytes(corpus_folder, tmp_path, tokenizers):
    class Wide(type(tokenizers["bytes"])):
        """Bytes with many unused ids, the last of them the end of text."""

        def __init__(self):
            super().__init__()
            self._pieces += [b""] * 70_000
            self.end_of_text = 70_256

    data = prepare_unopened(corpus_folder, Wide(), tmp_path / "out")
    tokens = np.fromfile(tmp_path / "out" / "train.bin", dtype="<u4")
    assert data.dtype == "uint32"
    assert tokens[-1] == 70_256
    assert len(tokens) == data.splits["train"].tokens
    assert token_dtype(65_536) == np.uint16 != token_dtype(65_537)


def prepare_unopened(sources, tokenizer, out) -> DataDescription:
    """Prepare with a tokenizer class that cannot be loaded again."""
    with pytest.raises(ValueError, match="altered or exchanged"):
        prepare(sources, tokenizer, out, **SHARES)
    return DataDescription.read(out / "description.json")


def test_a_share_of_zero_gives_no_such_split(corpus_folder, tmp_path):
    data = prepare(corpus_folder, "bytes", tmp_path / "out", validation_share=0.2, test_share=0, progress=False)
    assert set(data.description.splits) == {"train", "validation"}
    assert not (tmp_path / "out" / "test.bin").exists()
    with pytest.raises(ValueError, match="expected a split of train, validation"):
        data.split("test")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300", "sentencepiece:310"])
@pytest.mark.parametrize("seed", range(3))
def test_an_empty_split_is_refused_and_leaves_nothing(write_files, tmp_path, tokenizer, seed):
    folder = write_files({"a.txt": "one document, that can be in one split only " * 50})
    with pytest.raises(ValueError, match=r"none of .* in (train|validation|test).*--cut-text"):
        prepare(folder, tokenizer, tmp_path / "out", seed=seed, options=ReadOptions(cut_text=0), **SHARES)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_single_file_can_be_cut_into_splits(write_files, tmp_path, texts):
    folder = write_files({"a.txt": "".join(texts)})
    data = prepare(folder / "a.txt", "bytes", tmp_path / "out", options=ReadOptions(cut_text=500), **SHARES)
    assert sum(split.bytes for split in data.description.splits.values()) == len("".join(texts).encode())


def test_one_book_gives_all_splits_and_it_is_said(write_files, tmp_path, texts):
    book = "".join(f"{number} {text}" for number in range(20) for text in texts)
    said = []
    data = prepare(write_files({"a.txt": book}), "bytes", tmp_path / "out", progress=False, say=said.append)
    assert set(data.description.splits) == {"train", "validation", "test"}
    assert sum(split.bytes for split in data.description.splits.values()) == len(book.encode())
    assert ["--cut-text 0" in line for line in said] == [True]
    whole = dict(options=ReadOptions(cut_text=0), validation_share=0, test_share=0, progress=False)
    data = prepare(tmp_path / "files", "bytes", tmp_path / "whole", **whole, say=said.append)
    assert data.description.splits["train"].documents == len(said) == 1


@pytest.mark.parametrize("length", [10, 80, 160, 500, 7000], ids="lines of {} words".format)
def test_a_small_file_gives_all_splits_however_long_its_lines_are(write_files, tmp_path, length):
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefghij", k=drawn.randint(2, 8))) for _ in range(7000)]
    lines = [" ".join(words[first : first + length]) for first in range(0, 7000, length)]
    folder = write_files({"a.txt": "\n".join(lines)})
    data = prepare(folder, "bytes", tmp_path / "out", progress=False)
    assert set(data.description.splits) == {"train", "validation", "test"}
    assert sum(split.documents for split in data.description.splits.values()) > 80
    assert sum(split.bytes for split in data.description.splits.values()) == (folder / "a.txt").stat().st_size


@pytest.mark.usefixtures("single_documents")
def test_an_empty_split_does_not_stand_in_the_way_of_its_own_remedy(write_files, tmp_path, monkeypatch):
    """However much was recorded before: going on would end in the same empty split."""
    monkeypatch.setattr(unfinished, "SECONDS_BETWEEN", 0.0)
    folder = write_files({"a.jsonl": '{"text": "the same in every row"}\n' * 100})
    with pytest.raises(ValueError, match="--validation-share 0 does without the split"):
        prepare(folder, "bytes", tmp_path / "out", progress=False)
    assert not (tmp_path / "out.partial").exists()
    data = prepare(folder, "bytes", tmp_path / "out", progress=False, validation_share=0, test_share=0)
    assert data.description.splits["train"].documents == 100


def test_fewer_ids_than_asked_for_are_said(corpus_folder, tmp_path):
    said = []
    shares = dict(validation_share=0.2, test_share=0.2, progress=False)
    data = prepare(corpus_folder, "bpe:50000", tmp_path / "few", **shares, say=said.append)
    found = f"bpe:50000: the text gave no more than {data.description.vocab_size:,} ids; more text gives more"
    assert [line for line in said if "ids" in line] == [found]
    said.clear()
    prepare(corpus_folder, "bpe:300", tmp_path / "all", **shares, say=said.append)
    prepare(corpus_folder, tmp_path / "few", tmp_path / "again", **shares, say=said.append)
    assert not [line for line in said if "ids" in line]


def test_progress_shows_the_amount_of_text(corpus_folder, tmp_path, capsys, texts, impatient):
    prepare(corpus_folder, "bpe:300", tmp_path / "out", validation_share=0.2, test_share=0.2)
    shown = capsys.readouterr().err
    assert "reading for the tokenizer" in shown
    assert "preparing  100.0 %" in shown
    assert "MB/s" in shown


def test_what_is_soon_prepared_shows_no_progress(corpus_folder, tmp_path, capsys):
    prepare(corpus_folder, "bytes", tmp_path / "out", **SHARES)
    assert "preparing  " not in capsys.readouterr().err


def test_text_that_a_tokenizer_loses_in_spite_of_its_promise_is_noticed(corpus_folder, tmp_path, tokenizers):
    class Careless(type(tokenizers["bytes"])):
        """Drops the last token of longer texts."""

        def encode_batch(self, texts):
            return [ids[:-1] if len(ids) > 100 else ids for ids in super().encode_batch(texts)]

    with pytest.raises(ValueError, match=r"expected tokens for \d+ bytes of .*000\.txt"):
        prepare(corpus_folder, Careless(), tmp_path / "out", **SHARES)


# Whole or absent


class Fault(BaseException):
    """Stands for a signal at an awkward moment."""


def fail_at(monkeypatch, owner, name: str, call: int, error: BaseException) -> None:
    """Make the `call`-th call of a function raise."""
    original = getattr(owner, name)
    calls = iter(range(10**9))

    def failing(*arguments, **keywords):
        if next(calls) == call:
            raise error
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, failing)


@pytest.fixture
def single_documents(monkeypatch):
    """Every document is a batch of its own."""
    monkeypatch.setattr(encoding, "BATCH_DOCUMENTS", 1)


@pytest.mark.usefixtures("single_documents")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Fault(), RuntimeError()], ids=["interrupt", "signal", "bug"])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (SplitWriter, "write", 0),
        (SplitWriter, "write", 37),
        (SplitWriter, "close", 1),
        (SplitWriter, "finish", 2),
        (DataDescription, "write", 0),
        (os, "fsync", 0),
        (os, "fsync", 3),
        (disk, "rename", 0),
        (disk, "rename", 3),
    ],
)
def test_an_interrupted_prepare_leaves_nothing(corpus_folder, tmp_path, monkeypatch, owner, name, call, error):
    with monkeypatch.context() as patched:
        fail_at(patched, owner, name, call, error)
        with pytest.raises(type(error)):
            prepare(corpus_folder, "bytes", tmp_path / "out", **SHARES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]


@pytest.mark.usefixtures("single_documents")
def test_a_full_disk_is_named_and_leaves_nothing(corpus_folder, tmp_path, monkeypatch):
    fail_at(monkeypatch, SplitWriter, "write", 20, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match=r"expected room for .*out.*disk full.*--out on another disk") as caught:
        prepare(corpus_folder, "bytes", tmp_path / "out", **SHARES)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]


KILLED = """
import os, signal, sys
from polysketch.data import encoding, prepare, unfinished
from polysketch.data.writer import SplitWriter
encoding.BATCH_DOCUMENTS = 1
write = SplitWriter.write
def killed(self, *arguments):
    write(self, *arguments)
    if self.documents == 10:
        os.kill(os.getpid(), signal.SIGKILL)
SplitWriter.write = killed
prepare(sys.argv[1], "bytes", sys.argv[2], progress=False)
"""


def test_a_killed_prepare_leaves_nothing_that_looks_finished_and_can_be_repeated(corpus_folder, tmp_path):
    out = tmp_path / "out"
    finished = subprocess.run([sys.executable, "-c", KILLED, str(corpus_folder), str(out)], check=False)
    assert finished.returncode == -signal.SIGKILL
    assert not out.exists()
    assert (tmp_path / "out.partial" / "train-00000.bin").exists()
    with pytest.raises(FileNotFoundError):
        PreparedData.open(tmp_path / "out.partial")
    prepare(corpus_folder, "bytes", out, **SHARES).verify()
    prepare(corpus_folder, "bytes", tmp_path / "undisturbed", **SHARES)
    assert contents_of(out) == contents_of(tmp_path / "undisturbed")
    assert not (tmp_path / "out.partial").exists()


def test_two_prepares_of_one_folder_do_not_mix(corpus_folder, tmp_path):
    with whole_folder(tmp_path / "out"), pytest.raises(FileExistsError, match="at work"):
        prepare(corpus_folder, "bytes", tmp_path / "out", **SHARES)
    assert (tmp_path / "out").is_dir()


def test_an_existing_folder_is_never_overwritten(corpus_folder, tmp_path, prepared):
    before = contents_of(prepared.folder)
    for out in (prepared.folder, prepared.folder / "train.bin"):
        with pytest.raises(FileExistsError, match="new or empty"):
            prepare(corpus_folder, "bytes", out, **SHARES)
    assert contents_of(prepared.folder) == before


def test_an_empty_folder_is_filled_and_parents_are_made(corpus_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    prepare(corpus_folder, "bytes", tmp_path / "empty", **SHARES)
    prepare(corpus_folder, "bytes", tmp_path / "new" / "deep", **SHARES)
    assert set(contents_of(tmp_path / "empty")) == {"train.bin", "validation.bin", "test.bin", "description.json"}


def test_a_folder_of_somebody_else_under_the_temporary_name_is_left_alone(corpus_folder, tmp_path, write_files):
    taken = write_files({"precious.txt": "x"}, name="out" + folders.SUFFIX)
    with pytest.raises(FileExistsError, match="something else"):
        prepare(corpus_folder, "bytes", tmp_path / "out", **SHARES)
    assert (taken / "precious.txt").exists()


# Damage


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("position", [0, -1])
def test_one_flipped_bit_is_found(prepared, split, position):
    path = prepared.folder / f"{split}.bin"
    contents = bytearray(path.read_bytes())
    contents[position] ^= 1
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=rf"expected .*{split}\.bin with sha256"):
        PreparedData.open(prepared.folder).verify()


def test_a_cut_file_is_refused_on_opening(prepared):
    path = prepared.folder / "train.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"bytes in .*train\.bin.*cut short"):
        PreparedData.open(prepared.folder)


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json", "description.json"])
def test_a_missing_file_is_named(corpus_folder, tmp_path, name):
    prepare(corpus_folder, "bpe:300", tmp_path / "out", **SHARES)
    (tmp_path / "out" / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        PreparedData.open(tmp_path / "out")


def test_another_tokenizer_in_the_folder_is_refused(corpus_folder, tmp_path, texts):
    prepare(corpus_folder, "bpe:300", tmp_path / "out", **SHARES)
    BpeTokenizer.train(texts[:3], 300).save(tmp_path / "out")
    with pytest.raises(ValueError, match="altered or exchanged"):
        PreparedData.open(tmp_path / "out")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("{", "damaged"),
        ("[]", "other JSON"),
        ('{"format": "polysketch-data", "version": 99}', "version 1.*found 99"),
        ('{"format": "polysketch-data", "version": 1}', "complete description.*tokenizer"),
    ],
)
def test_a_damaged_description_is_refused(prepared, contents, message):
    (prepared.folder / "description.json").write_text(contents)
    with pytest.raises(ValueError, match=message):
        PreparedData.open(prepared.folder)


def test_an_unknown_dtype_or_tokenizer_is_refused(prepared):
    path = prepared.folder / "description.json"
    described = json.loads(path.read_text())
    del described["sha256"]  # as those of earlier versions
    original = json.dumps(described)
    for found, instead in (("uint16", "uint12"), ('"kind": "bytes"', '"kind": "words"')):
        path.write_text(original.replace(found, instead))
        with pytest.raises(ValueError, match=instead[-6:].strip('"')):
            PreparedData.open(prepared.folder)


def test_a_folder_that_is_missing_or_not_prepared_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*polysketch prepare"):
        PreparedData.open(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"description\.json"):
        PreparedData.open(tmp_path)


def test_a_description_survives_writing_and_reading(prepared, tmp_path):
    prepared.description.write(tmp_path / "copy.json")
    assert DataDescription.read(tmp_path / "copy.json") == prepared.description


def test_a_context_longer_than_the_data_is_refused(prepared):
    tokens = prepared.split("test").tokens
    assert TrainingWindows(tokens, len(tokens) - 1, seed=0).num_windows == 1
    with pytest.raises(ValueError, match=rf"at least {len(tokens) + 1} tokens.*found {len(tokens)}"):
        TrainingWindows(tokens, len(tokens), seed=0)


@pytest.mark.parametrize(("module", "extra"), [("tokenizers", "train"), ("sentencepiece", "sentencepiece")])
def test_a_missing_extra_says_how_to_install_it(corpus_folder, tmp_path, monkeypatch, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    kind = {"tokenizers": "bpe"}.get(module, module)
    with pytest.raises(ImportError, match=rf"pip install 'polysketch\[{extra}\]'"):
        prepare(corpus_folder, f"{kind}:400", tmp_path / "out", **SHARES)
    assert not (tmp_path / "out").exists()


def test_the_bytes_tokenizer_needs_no_extra(corpus_folder, tmp_path, monkeypatch):
    for module in ("tokenizers", "sentencepiece", "datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
    prepare(corpus_folder, "bytes", tmp_path / "out", **SHARES).verify()


@pytest.mark.data
def test_the_books_are_split_as_their_table_says(outside_data, tmp_path):
    books = outside_data / "books"
    names = {}
    for line in (books / "books.tsv").read_text().splitlines()[1:]:
        _, split, file, *_ = line.split("\t")
        names.setdefault(split, []).append(books / file)
    few = [*names["train"][:3], *names["validation"][:1], *names["test"][:1]]
    data = prepare(few, "bytes", tmp_path / "out", split_table=books / "books.tsv", progress=False)
    assert {name: split.documents for name, split in data.description.splits.items()} == {
        "train": 3,
        "validation": 1,
        "test": 1,
    }
