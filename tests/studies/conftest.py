"""Texts for studies: books of a few words where POLYSKETCH_DATA names a folder of them."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from pictures import no_pixels, pixels  # noqa: F401  (fixtures)
from polysketch.data import PreparedData, prepare
from polysketch.training import trainer

WORDS = ("whale", "ship", "sea", "captain", "harpoon", "self", "value", "key")


def text_of(number: int, lines: int) -> str:
    """Lines of words in random order."""
    words = random.Random(number)
    return "\n".join(" ".join(words.choice(WORDS) for _ in range(10)) for _ in range(lines))


@pytest.fixture(autouse=True)
def _no_plots_of_runs(monkeypatch) -> None:
    """Those of studies are made; what a run draws, the tests of training look at."""
    monkeypatch.setattr(trainer, "plot_loss", lambda lines, path: False)


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


@pytest.fixture
def arena(tmp_path, monkeypatch) -> Path:
    """Few rows in the layouts and under the names of Long Range Arena's files, in the place of a data folder."""
    folder = tmp_path / "data" / "lra"
    for name in ("aan", "cifar-10-batches-bin"):
        (folder / name).mkdir(parents=True)
    for name in ("imdb_train_2000.jsonl", "imdb_test_1000.jsonl"):
        lines = [json.dumps({"text": f"review number {number}", "label": number % 2}) for number in range(40)]
        (folder / f"{name}.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    for name in ("train", "eval", "test"):
        lines = [f"{number % 2}\tA{number}\tB{number}\ta text\tanother {number}" for number in range(20)]
        (folder / "aan" / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines))
    generator = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = generator.integers(0, 256, (10, 1 + 32 * 32 * 3), np.uint8)
        rows[:, 0] = np.arange(10)
        (folder / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(rows.tobytes())
    _pathfinder(folder / "pathfinder32" / "curv_contour_length_14", generator)
    monkeypatch.setenv("POLYSKETCH_DATA", str(folder.parent))
    return folder


def _pathfinder(folder: Path, generator: np.random.Generator) -> None:
    image = pytest.importorskip("PIL.Image")
    (folder / "metadata").mkdir(parents=True)
    (folder / "imgs" / "0").mkdir(parents=True)
    drawn = generator.integers(0, 256, (80, 8, 8), np.uint8)
    for number, picture in enumerate(drawn):
        image.fromarray(picture).save(folder / "imgs" / "0" / f"sample_{number}.png")
    lines = [f"imgs/0 sample_{number}.png {number} {number % 2}" for number in range(len(drawn))]
    (folder / "metadata" / "0.npy").write_text("\n".join(lines) + "\n")
