"""Large text is compared with its sums once a version of its files, and small text at every start."""

import os
import shutil
from pathlib import Path

import pytest

from polysketch.data import PreparedData, compared_files, prepared
from polysketch.training import requirements, train
from polysketch.training.requirements import verify_at_start


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "polysketch" / "compared.json"


@pytest.fixture
def data(data_folder, tmp_path) -> PreparedData:
    return PreparedData.open(shutil.copytree(data_folder, tmp_path / "data"))


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The names of token files as they are read and compared."""
    names: list[str] = []
    sha256_of = prepared.sha256_of

    def noted(path):
        if path.suffix == ".bin":
            names.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(prepared, "sha256_of", noted)
    return names


@pytest.fixture
def _large(monkeypatch) -> None:
    """So that a few bytes count as more than 64 GiB."""
    monkeypatch.setattr(requirements, "VERIFIED_AT_START", 0)


def damage(path: Path) -> None:
    """One bit, and no time of change that is the one before."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def test_small_text_is_read_at_every_start(data, read):
    for _ in range(2):
        verify_at_start(data)
    assert read == ["train.bin", "validation.bin"] * 2


@pytest.mark.usefixtures("_large")
def test_large_text_is_read_once(data, read):
    for _ in range(3):
        verify_at_start(data)
    assert read == ["train.bin", "validation.bin"]


@pytest.mark.usefixtures("_large")
def test_a_changed_file_is_read_again_and_refused_every_time(data, read):
    verify_at_start(data)
    damage(data.folder / "validation.bin")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"validation\.bin with sha256 .* altered or damaged"):
            verify_at_start(data)
    assert read == ["train.bin", *["validation.bin"] * 3]


@pytest.mark.usefixtures("_large")
def test_another_place_is_another_version(data, read, tmp_path):
    verify_at_start(data)
    copy = shutil.copytree(data.folder, tmp_path / "copy")
    verify_at_start(PreparedData.open(copy))
    assert read == ["train.bin", "validation.bin"] * 2


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1}', b"\xff"])
def test_a_damaged_list_is_no_list(data, read, cache, content):
    """And it is made anew."""
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    for _ in range(2):
        verify_at_start(data)
    assert read == ["train.bin", "validation.bin"]


@pytest.mark.usefixtures("_large")
def test_without_a_cache_everything_is_read(data, read, cache):
    cache.parent.parent.write_text("a file in the place of the folder")
    for _ in range(2):
        verify_at_start(data)
    assert read == ["train.bin", "validation.bin"] * 2


@pytest.mark.usefixtures("_large")
def test_a_run_on_large_text_refuses_a_damaged_file(make_config, data):
    damage(data.folder / "train.bin")
    with pytest.raises(ValueError, match=r"train\.bin with sha256"):
        train(make_config(data=data.folder), progress=False)


def test_the_list_does_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(compared_files, "_MOST", 3)
    for number in range(5):
        (tmp_path / f"{number}.bin").write_bytes(b"x")
        compared_files.remember(tmp_path / f"{number}.bin", "sum")
    known = [compared_files.is_compared(tmp_path / f"{number}.bin", "sum") for number in range(5)]
    assert known == [False, False, True, True, True]
