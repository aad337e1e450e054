"""Tokens in several files are read as one sequence, in the same order and bits; a file that is not whole is named."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from attention.covering import first_always
from polysketch.data import DataDescription, DocumentRows, PreparedData, TrainingWindows, prepare, tokens
from polysketch.data.tokens import ShardedTokens, TokenFile, stretch

SHARES = {"validation_share": 0.2, "test_share": 0.2, "progress": False}
SHARD = 333  # less than a document, so that boundaries lie inside documents


@pytest.fixture
def whole(corpus_folder: Path, tmp_path: Path) -> PreparedData:
    """A folder with one file for each split."""
    return prepare(corpus_folder, "bpe:400", tmp_path / "whole", **SHARES)


@pytest.fixture
def cut(corpus_folder: Path, tmp_path: Path) -> PreparedData:
    """The same in many files."""
    return prepare(corpus_folder, "bpe:400", tmp_path / "cut", shard_tokens=SHARD, **SHARES)


def sharded(contents: np.ndarray, sizes: list[int], folder: Path) -> ShardedTokens:
    """An array, cut into files of these sizes and a last one of what is left."""
    files = []
    for number, part in enumerate(np.split(contents, np.cumsum(sizes))):
        part.tofile(folder / f"{number}.bin")
        files.append(TokenFile(folder / f"{number}.bin", part.dtype, len(part)))
    return ShardedTokens(files)


def test_files_are_full_but_the_last_and_hold_the_bytes_of_one_file(whole, cut):
    for name, split in cut.description.splits.items():
        files = [shard.file for shard in split.shards]
        assert files == [f"{name}-{number:05}.bin" for number in range(len(files))]
        assert len(files) > 3
        assert [shard.tokens for shard in split.shards[:-1]] == [SHARD] * (len(files) - 1)
        assert 0 < split.shards[-1].tokens <= SHARD
        joined = b"".join((cut.folder / file).read_bytes() for file in files)
        assert joined == (whole.folder / f"{name}.bin").read_bytes()
        assert (split.tokens, split.documents, split.bytes) == (
            whole.description.splits[name].tokens,
            whole.description.splits[name].documents,
            whole.description.splits[name].bytes,
        )
    cut.verify()


def test_a_boundary_lies_inside_a_document_and_windows_lie_across_it(cut):
    end = cut.description.end_of_text
    train = cut.split("train").tokens
    assert (np.asarray(train)[SHARD - 1 : -1 : SHARD] != end).any()
    windows = TrainingWindows(train, 64, seed=3)
    starts = windows.starts(np.arange(windows.num_windows))
    assert (starts // SHARD != (starts + 64) // SHARD).any()


@pytest.mark.parametrize("context", first_always([16, 500, 64], 2))
def test_training_reads_the_same_from_one_file_and_from_many(whole, cut, context):
    one, many = whole.split("train").tokens, cut.split("train").tokens
    assert isinstance(one, np.memmap)
    assert isinstance(many, ShardedTokens)
    windows = [TrainingWindows(tokens, context, seed=5) for tokens in (one, many)]
    rows = [DocumentRows(tokens, context, 5, whole.description.end_of_text) for tokens in (one, many)]
    assert rows[0].num_rows == rows[1].num_rows
    for step in range(30):
        assert torch.equal(windows[0].batch(step, 5), windows[1].batch(step, 5))
        first, second = (each.batch(step, 5) for each in rows)
        assert torch.equal(first.ids, second.ids)
        assert torch.equal(first.targets, second.targets)
        assert torch.equal(first.cu_seqlens, second.cu_seqlens)


@pytest.mark.parametrize("sizes", [[], [1], [1, 1, 1], [7, 0, 20], [50], [99], [33, 33]])
def test_it_answers_as_an_array_does(tmp_path, sizes):
    contents = np.random.default_rng(0).integers(0, 2**16, 100).astype("<u2")
    found = sharded(contents, sizes, tmp_path)
    assert len(found) == found.shape[0] == 100
    assert found.dtype == contents.dtype
    assert np.array_equal(np.asarray(found), contents)
    assert np.array_equal(np.array(found, dtype=np.int64), contents.astype(np.int64))
    for start in (0, 1, 6, 7, 27, 32, 33, 50, 99, 100, -3, None):
        assert start is None or start == 100 or found[start] == contents[start]
        for stop in (0, 1, 7, 8, 33, 34, 66, 100, 200, -1, None):
            assert np.array_equal(found[start:stop], contents[start:stop])
            assert np.array_equal(found[start:stop:3], contents[start:stop:3])
    for shape in ((0,), (50,), (4, 9), (2, 3, 4)):
        positions = np.random.default_rng(1).integers(0, 100, shape)
        assert np.array_equal(found[positions], contents[positions])
        assert found[positions].shape == shape
        assert found[positions].dtype == contents.dtype
    for outside in (100, -101):
        with pytest.raises(IndexError):
            found[outside]
    for outside in ([3, 100], [-1, 5]):
        with pytest.raises(IndexError, match=r"positions in \[0, 100\)"):
            found[np.array(outside)]


def test_a_stretch_is_read_when_it_is_asked_for(tmp_path):
    contents = np.arange(100, dtype="<u4")
    found = sharded(contents, [10, 20, 30], tmp_path)
    for start, stop in ((0, 100), (5, 95), (10, 30), (12, 15), (30, 30), (59, 61), (0, 1000)):
        part = stretch(found, start, stop)
        assert isinstance(part, ShardedTokens)
        assert np.array_equal(np.asarray(part), contents[start:stop])
        assert np.array_equal(stretch(contents, start, stop), contents[start:stop])


def test_nothing_is_opened_before_it_is_read_and_few_files_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "MAPPED_FILES", 3)
    opened = []
    original = TokenFile.map
    monkeypatch.setattr(TokenFile, "map", lambda self: opened.append(self.path.name) or original(self))
    contents = np.arange(100, dtype="<u2")
    found = sharded(contents, [10] * 9, tmp_path)
    assert opened == []
    assert found[55] == 55
    assert opened == ["5.bin"]
    assert np.array_equal(found[np.arange(100)], contents)
    before = len(opened)
    assert found[99] == 99  # still mapped
    assert len(opened) == before
    assert found._map.cache_info().currsize == 3


def test_a_slice_inside_a_file_is_no_copy(tmp_path):
    found = sharded(np.arange(100, dtype="<u2"), [50], tmp_path)
    assert isinstance(found[10:20], np.memmap)
    assert not found[10:20].flags.writeable


def test_files_of_two_types_are_no_sequence(tmp_path):
    with pytest.raises(ValueError, match="token files of one type, found uint16, uint32"):
        ShardedTokens([TokenFile(tmp_path / "a", np.dtype("<u2"), 1), TokenFile(tmp_path / "b", np.dtype("<u4"), 1)])


# Damage


@pytest.mark.parametrize("number", [0, 2])
def test_a_lost_shard_is_named(cut, number):
    path = cut.folder / f"train-{number:05}.bin"
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"expected the token file .*{path.name}, found nothing"):
        PreparedData.open(cut.folder)


@pytest.mark.parametrize("change", [-2, -1, 2])
def test_a_cut_or_longer_shard_is_named(cut, change):
    path = cut.folder / "validation-00001.bin"
    contents = path.read_bytes()
    path.write_bytes(contents[:change] if change < 0 else contents + bytes(change))
    with pytest.raises(ValueError, match=rf"expected {2 * SHARD} bytes in .*{path.name}, found {2 * SHARD + change}"):
        PreparedData.open(cut.folder)


@pytest.mark.parametrize("position", [0, 100, -1])
def test_a_flipped_bit_in_a_shard_is_named(cut, position):
    path = cut.folder / "train-00002.bin"
    contents = bytearray(path.read_bytes())
    contents[position] ^= 1
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=rf"expected .*{path.name} with sha256"):
        PreparedData.open(cut.folder).verify()


def test_a_shard_that_goes_while_it_is_read_is_named(cut):
    train = cut.split("train").tokens
    (cut.folder / "train-00001.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"train-00001\.bin"):
        train[SHARD]


def test_two_shards_exchanged_are_found(cut):
    first, second = (cut.folder / f"train-{number:05}.bin" for number in (0, 1))
    contents = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(contents)
    with pytest.raises(ValueError, match=r"train-00000\.bin with sha256"):
        PreparedData.open(cut.folder).verify()


def test_counts_that_do_not_add_up_are_refused(cut):
    path = cut.folder / "description.json"
    values = json.loads(path.read_text())
    values["splits"]["train"]["tokens"] += 1
    del values["sha256"]
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="tokens in the files of train"):
        PreparedData.open(cut.folder)


# The description


def test_a_folder_of_one_file_a_split_is_described_as_ever(whole):
    values = json.loads((whole.folder / "description.json").read_text())
    assert values["version"] == 1
    assert list(values["splits"]["train"]) == ["file", "tokens", "documents", "bytes", "sha256"]
    assert values["splits"]["train"]["file"] == "train.bin"


def test_a_folder_of_many_files_says_so_to_those_who_cannot_read_it(cut):
    values = json.loads((cut.folder / "description.json").read_text())
    assert values["version"] == 2
    assert DataDescription.from_dict(values) == cut.description
    fingerprints = {split.sha256 for split in cut.description.splits.values()}
    assert len(fingerprints) == 3


@pytest.mark.parametrize("field", ["file", "tokens", "sha256"])
def test_a_description_without_a_part_is_refused(cut, field):
    values = json.loads((cut.folder / "description.json").read_text())
    del values["splits"]["train"]["shards"][0][field], values["sha256"]
    with pytest.raises(ValueError, match="expected a complete description"):
        DataDescription.from_dict(values)


def test_no_room_in_a_file_is_refused(corpus_folder, tmp_path):
    with pytest.raises(ValueError, match="expected shard_tokens of at least 1, found 0"):
        prepare(corpus_folder, "bytes", tmp_path / "out", shard_tokens=0, **SHARES)


@pytest.mark.parametrize("tokens_in_all", [SHARD - 1, SHARD, SHARD + 1, 2 * SHARD])
def test_a_file_that_is_just_full_needs_no_next_one(write_files, tmp_path, tokens_in_all):
    folder = write_files({"train/a.txt": "x" * (tokens_in_all - 1), "test/a.txt": "x"})
    data = prepare(folder, "bytes", tmp_path / "out", shard_tokens=SHARD, progress=False)
    assert [shard.tokens for shard in data.description.splits["train"].shards] == [
        min(SHARD, tokens_in_all - start) for start in range(0, tokens_in_all, SHARD)
    ]
    data.verify()
