"""Datasets by name: each recipe reads a local copy of the same layout, lazily, and says clearly what is missing."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from polysketch.data import PreparedData, ReadOptions, load_tokenizer, prepare
from polysketch.data.corpus import RECIPES, Corpus, Selection
from polysketch.data.corpus import hub as hub_module
from polysketch.data.encoding import BATCH_BYTES
from polysketch.data.splits import SplitRule

# The files of each dataset's repository, by split, and the columns beside the text.
LAYOUTS = {
    "pg19": (
        {split: f"data/{split}-00000-of-00001.parquet" for split in ("train", "validation", "test")},
        {"short_book_title": "T", "publication_date": 1900, "url": "u"},
    ),
    "wiki40b": (
        {split: f"en/{split}-00000-of-00001.parquet" for split in ("train", "validation", "test")},
        {"wikidata_id": "Q1", "version_id": "1"},
    ),
    "c4": (
        {split: f"en/c4-{split}.00000-of-00001.json.gz" for split in ("train", "validation")},
        {"timestamp": "2019-04-25T12:57:54Z", "url": "u"},
    ),
    "fineweb-edu": ({"train": "sample/10BT/000_00000.parquet"}, {"id": "1", "int_score": 3}),
}


def rows_of(split: str, count: int, columns: dict) -> list[dict]:
    return [{"text": f"{split} {number} _NEWLINE_ é"} | columns for number in range(count)]


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


@pytest.fixture
def mirror(tmp_path, monkeypatch) -> Path:
    """A folder with a small copy of every dataset, with the card that names its configurations."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, (files, columns) in LAYOUTS.items():
        folder = tmp_path / "mirror" / RECIPES[name].hub_name
        for split, file in files.items():
            write_rows(folder / file, rows_of(split, 30, columns))
        lines = [f"    - split: {split}\n      path: {file}" for split, file in files.items()]
        config = f"- config_name: {RECIPES[name].config or 'default'}\n  data_files:\n" + "\n".join(lines)
        (folder / "README.md").write_text(f"---\nconfigs:\n{config}\n---\n# A card\n")
    return tmp_path / "mirror"


def read(*sources: str, mirror: Path | None = None, **limits) -> list[tuple[str, str]]:
    corpus = Corpus(list(sources), ReadOptions(), SplitRule(), selection=Selection(**limits), mirror=mirror)
    return [(document.split, document.text) for document in corpus.documents()]


def test_every_recipe_has_a_layout_here():
    assert set(LAYOUTS) == set(RECIPES)
    for name, (files, _) in LAYOUTS.items():
        assert tuple(files) == RECIPES[name].splits


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_reads_every_split_of_a_copy_of_its_repository(name, mirror):
    found = read(name, mirror=mirror)
    assert [text for _, text in found] == [
        row["text"] for split in RECIPES[name].splits for row in rows_of(split, 30, {})
    ]
    if len(RECIPES[name].splits) > 1:  # one alone is split by the hash
        assert all(text.startswith(f"{split} ") for split, text in found)
    else:
        assert {split for split, _ in found} == {"train", "validation", "test"}


def test_a_dataset_of_the_hub_is_found_in_the_mirror_too(mirror):
    assert read("hf:allenai/c4:en", mirror=mirror) == read("c4", mirror=mirror)


def test_documents_are_counted_for_each_split_and_each_source(mirror):
    splits = [split for split, _ in read("pg19", "c4", mirror=mirror, max_documents=4)]
    assert splits == ["train"] * 4 + ["validation"] * 4 + ["test"] * 4 + ["train"] * 4 + ["validation"] * 4


def test_documents_of_a_folder_are_counted_across_its_files(write_files):
    folder = write_files({f"{number}.jsonl": '{"text": "a"}\n{"text": "b"}\n' for number in range(4)})
    assert len(read(str(folder), max_documents=5)) == 5
    other = write_files({f"{split}/{n}.txt": split for split in ("train", "test") for n in range(4)}, "other")
    assert [split for split, _ in read(str(other), max_documents=3)] == ["test"] * 3 + ["train"] * 3


def test_only_the_splits_asked_for_are_kept(mirror, write_files):
    found = read("pg19", mirror=mirror, splits=("validation", "test"))
    assert [split for split, _ in found] == ["validation"] * 30 + ["test"] * 30
    folder = write_files({"train/a.txt": b"\xff", "test/b.txt": "b"})  # what is not wanted is not read
    assert read(str(folder), splits=("test",)) == [("test", "b")]
    assert {split for split, _ in read("fineweb-edu", mirror=mirror, splits=("train",))} == {"train"}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_documents": 0}, "max_documents of at least 1"),
        ({"splits": ()}, "found none"),
        ({"splits": ("dev",)}, "dev"),
    ],
)
def test_a_selection_of_nothing_is_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        Selection(**limits)


class Text(str):
    """A text that knows how much of its kind is alive."""

    alive = 0
    most = 0

    def __new__(cls, value: str) -> "Text":
        cls.alive += len(value)
        cls.most = max(cls.most, cls.alive)
        return super().__new__(cls, value)

    def __del__(self) -> None:
        type(self).alive -= len(self)


@pytest.fixture
def endless(monkeypatch) -> Callable[[], int]:
    """Stand in for the library with splits that never end; the function says how many rows were drawn."""
    drawn = 0

    def rows(split: str):
        nonlocal drawn
        while True:
            drawn += 1
            yield {"text": Text(f"{split} {drawn} ".ljust(50_000, "x"))}

    class Datasets:
        @staticmethod
        def load_dataset(path, name, *, streaming):
            assert streaming
            assert (path, name) == (RECIPES["pg19"].hub_name, None)
            return {split: rows(split) for split in RECIPES["pg19"].splits}

    monkeypatch.setattr(hub_module, "require", lambda module: Datasets)
    Text.alive = Text.most = 0
    return lambda: drawn


def test_no_more_is_drawn_from_a_stream_than_is_asked_for(endless):
    assert len(read("pg19", max_documents=7)) == 21
    assert endless() == 21
    assert len(read("pg19", max_documents=2, splits=("validation",))) == 2
    assert endless() == 23


@pytest.mark.full
def test_memory_holds_a_batch_of_a_stream_however_long_it_is(endless, tmp_path):
    data = prepare("pg19", "bytes", tmp_path / "out", max_documents=400, progress=False)  # 60 MB
    assert sum(split.bytes for split in data.description.splits.values()) == 1200 * 50_000
    assert endless() == 1200
    assert BATCH_BYTES <= Text.most <= 2 * BATCH_BYTES + 100_000


def test_a_stream_is_prepared_with_a_tokenizer_of_its_training_split(mirror, tmp_path):
    data = prepare("wiki40b", "bpe:300", tmp_path / "a", mirror=mirror, max_documents=20, progress=False)
    assert {name: split.documents for name, split in data.description.splits.items()} == dict.fromkeys(
        ("train", "validation", "test"), 20
    )
    assert b"validation" not in data.tokenizer._pieces
    assert data.description.sources == ("wiki40b",)
    held_out = prepare("pg19", str(tmp_path / "a"), tmp_path / "b", mirror=mirror, splits=["test"], progress=False)
    assert set(held_out.description.splits) == {"test"}
    assert held_out.tokenizer.sha256 == load_tokenizer(tmp_path / "a").sha256


def test_a_source_that_has_splits_of_its_own_may_lack_one(mirror, tmp_path):
    prepare("c4", "bytes", tmp_path / "out", mirror=mirror, progress=False)
    assert set(PreparedData.open(tmp_path / "out").description.splits) == {"train", "validation"}


def test_a_split_that_was_asked_for_must_not_be_empty(mirror, tmp_path):
    with pytest.raises(ValueError, match="none of 30 in test"):
        prepare("c4", "bytes", tmp_path / "out", mirror=mirror, splits=["validation", "test"], progress=False)
    with pytest.raises(ValueError, match="bpe:300 is trained on it, found test"):
        prepare("c4", "bpe:300", tmp_path / "out", mirror=mirror, splits=["test"], progress=False)
    assert not (tmp_path / "out").exists()


def test_without_a_network_the_way_out_is_named(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"reach allenai/c4.*--mirror"):
        read("c4")


def test_a_mirror_without_the_dataset_says_how_to_fill_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"hf download allenai/c4 --repo-type dataset --local-dir .*allenai/c4"):
        read("c4", mirror=tmp_path)


def test_a_program_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "emozilla" / "pg19"
    folder.mkdir(parents=True)
    (folder / "pg19.py").write_text("raise SystemExit('run')\n")
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        read("pg19", mirror=tmp_path)
    assert "pg19" in str(caught.value)


def test_a_name_that_is_a_path_as_well_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c4").mkdir()
    (tmp_path / "c4" / "a.txt").write_text("here")
    with pytest.raises(ValueError, match=r"found both.*\./c4.*hf:allenai/c4"):
        read("c4")
    assert read("./c4") == [(SplitRule().split_of("here"), "here")]
