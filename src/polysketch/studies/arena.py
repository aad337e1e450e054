"""The studies of Long Range Arena (Tay et al. 2021), which LLOPS measures on in table 1.

Sizes: `smoke` is a few steps, `cpu` what two cores do in an evening, `gpu` for one GPU; `words`, of reviews, has pieces
of words in place of bytes, and takes minutes. `paper` is the published configuration of Nystromformer, whose tasks and
models Skyformer and LLOPS take over. It has learned positions and dropout, too.

Files are those of the benchmark, in the folder `lra` of POLYSKETCH_DATA.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polysketch.data.tokenization import BytesTokenizer, build_tokenizer
from polysketch.studies.task_study import FEW, TaskSettings, TaskStudy
from polysketch.tasks import Task
from polysketch.tasks.base import Asks
from polysketch.tasks.images import classified_images, pathfinder
from polysketch.tasks.sources import classified_pairs, classified_texts, labelled_texts, split_off

_BEHIND = 0.02
_OF_TWO, _OF_TEN = 0.6, 0.2  # a tenth above a guess among so many classes
LISTOPS_LEARNED = 0.4
"""Accuracy from which on ListOps is learned: who knows the outermost operator alone is right in 35 % of rows."""

_SOFTMAX_AND_BEST = "LLOPS, table 1: softmax {} %, best in linear time {} %"


def _paper(
    task: Mapping[str, Any], steps: int, warmup: int, batch_size: int = 32, test_rows: int = 2_000
) -> TaskSettings:
    """A configuration of lra_config.py."""
    return TaskSettings(
        task=dict(task),
        preset="arena-paper",
        nearby=0,
        steps=steps,
        batch_size=batch_size,
        learning_rate=1e-4,
        evaluations=50,
        test_rows=test_rows,
        training={"warmup": warmup, "weight_decay": 0.0},
    )


LISTOPS = TaskStudy(
    "listops",
    claim="An encoder with attention in linear time learns ListOps within 2 % of softmax.",
    paper=_SOFTMAX_AND_BEST.format("48.49", "48.29"),
    behind_softmax=_BEHIND,
    learned=LISTOPS_LEARNED,
    sizes={
        "smoke": TaskSettings(task={"shortest": 5, "length": 60}, nearby=0, **FEW),
        "cpu": TaskSettings(task={"shortest": 20, "length": 200}, nearby=0, steps=2000, learning_rate=1e-3),
        "gpu": TaskSettings(task={}, layers=4, nearby=0, steps=20_000, batch_size=64, learning_rate=1e-3),
        "paper": _paper({"examples": 96_000}, 5_000, 1_000),
    },
)


class FilesStudy(TaskStudy):
    """A task out of local files.

    Args:
        asks: what the task asks.
        read: (folder of Long Range Arena, settings of the task, seed) -> the task.
        **described: as for `TaskStudy`, but its name.
    """

    def __init__(self, asks: Asks, read: Callable[[Path, dict[str, Any], int], Task], **described: Any) -> None:
        self._asks, self._read = asks, read
        super().__init__("classification", **described)

    @property
    def asks(self) -> str:
        """As given."""
        return self._asks

    def task_of(self, settings: TaskSettings, seed: int) -> Task:
        """Read from the folder that POLYSKETCH_DATA names.

        Raises:
            ValueError: it names none.
            FileNotFoundError: the files are not in it.
        """
        folder = os.environ.get("POLYSKETCH_DATA")
        if not folder:
            raise ValueError("expected the environment variable POLYSKETCH_DATA to name the folder of data, found none")
        return self._read(Path(folder) / "lra", dict(settings.task), seed)


def _found(folder: Path, *names: str) -> list[Path]:
    """Files and folders in a folder.

    Raises:
        FileNotFoundError: some are missing; all of these are named.
    """
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(f"expected {', '.join(missing)} of Long Range Arena in {folder}, found none")
    return [folder / name for name in names]


def _reviews(folder: Path, task: dict[str, Any], seed: int) -> Task:
    """2,000 reviews to train on, of which a tenth is kept for validation, and 1,000 to test; or all, where `files`
    names their folder. Bytes, or what `tokenizer` makes of them, which is trained on those to train on."""
    whole, specification = task.pop("files", None), task.pop("tokenizer", "bytes")
    names = (f"{whole}/train", f"{whole}/test") if whole else ("imdb_train_2000.jsonl.gz", "imdb_test_1000.jsonl.gz")
    train, test = _found(folder, *names)
    tokenizer = build_tokenizer(specification, lambda: (row.texts[0] for row in labelled_texts(train)))
    sources: dict[str, Sequence[Path]] = {"train": [train], "test": [test]}
    return split_off(classified_texts(sources, tokenizer.encode, tokenizer.vocab_size, **task), 0.1, seed)


REVIEWS = FilesStudy(
    "class",
    _reviews,
    claim="An encoder with attention in linear time classifies reviews within 2 % of softmax.",
    paper=_SOFTMAX_AND_BEST.format("82.96", "73.94"),
    behind_softmax=_BEHIND,
    learned=_OF_TWO,
    sizes={
        "smoke": TaskSettings(task={"max_tokens": 50}, nearby=0, **FEW),
        "cpu": TaskSettings(task={"max_tokens": 1000}, nearby=0, steps=1000, batch_size=16, learning_rate=1e-3),
        "words": TaskSettings(
            task={"max_tokens": 512, "tokenizer": "bpe:4096"},
            nearby=0,
            steps=225,  # two times through the reviews
            batch_size=16,
            learning_rate=1e-3,
            evaluations=9,
        ),
        "gpu": TaskSettings(task={"max_tokens": 4000}, layers=4, nearby=0, steps=5_000, learning_rate=1e-3),
        "paper": _paper({"max_tokens": 4000, "files": "aclImdb"}, 20_000, 8_000, test_rows=25_000),
    },
)


def _retrieval(folder: Path, task: dict[str, Any], seed: int) -> Task:
    """Pairs of papers, of which one cites the other or not: the three files of the folder `aan`."""
    del seed  # the splits are published
    names = {"train": "train", "validation": "eval", "test": "test"}
    files = _found(folder, *(f"aan/new_aan_pairs.{name}.tsv" for name in names.values()))
    tokenizer = BytesTokenizer()
    sources: dict[str, Sequence[Path]] = {split: [file] for split, file in zip(names, files, strict=True)}
    return classified_pairs(sources, tokenizer.encode, tokenizer.vocab_size, **task)


RETRIEVAL = FilesStudy(
    "pair",
    _retrieval,
    claim="An encoder with attention in linear time tells pairs of documents within 2 % of softmax.",
    paper=_SOFTMAX_AND_BEST.format("83.23", "83.90"),
    behind_softmax=_BEHIND,
    learned=_OF_TWO,
    sizes={
        "smoke": TaskSettings(task={"max_tokens": 50}, nearby=0, **FEW),
        "cpu": TaskSettings(task={"max_tokens": 1000}, nearby=0, steps=2_000, batch_size=16, learning_rate=1e-3),
        "gpu": TaskSettings(task={"max_tokens": 4000}, nearby=0, steps=10_000, learning_rate=1e-3),
        "paper": _paper({"max_tokens": 4000}, 30_000, 800, test_rows=17_437),
    },
)


def _pathfinder(folder: Path, task: dict[str, Any], seed: int) -> Task:
    """Images of the folder `pathfinder32/curv_contour_length_14`, or another that `files` names: a tenth to validate on
    and a tenth to test."""
    found = pathfinder({"train": _found(folder, task.pop("files", "pathfinder32/curv_contour_length_14"))})
    return split_off(split_off(found, 0.1, seed, "test"), 1 / 9, seed)


PATHFINDER = FilesStudy(
    "class",
    _pathfinder,
    claim="An encoder with attention in linear time follows paths through pixels within 2 % of softmax.",
    paper=_SOFTMAX_AND_BEST.format("70.45", "74.16"),
    behind_softmax=_BEHIND,
    learned=_OF_TWO,
    sizes={
        "smoke": TaskSettings(task={}, nearby=0, **FEW),
        "cpu": TaskSettings(task={}, nearby=0, steps=2_000, batch_size=16, learning_rate=1e-3),
        "gpu": TaskSettings(task={}, nearby=0, steps=20_000, batch_size=128, learning_rate=1e-3),
        "paper": _paper({}, 62_400, 312, batch_size=256, test_rows=20_000),
    },
)


def _image(folder: Path, task: dict[str, Any], seed: int) -> Task:
    """The grey pixels of CIFAR-10, binary version, in the folder `cifar-10-batches-bin`: a tenth to validate on."""
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    *train, test = _found(folder / "cifar-10-batches-bin", *names, "test_batch.bin")
    return split_off(classified_images({"train": train, "test": [test]}, grey=True, **task), 0.1, seed)


IMAGE = FilesStudy(
    "class",
    _image,
    claim="An encoder with attention in linear time classifies images by their pixels within 2 % of softmax.",
    paper=_SOFTMAX_AND_BEST.format("64.36", "58.66"),
    behind_softmax=_BEHIND,
    learned=_OF_TEN,
    sizes={
        "smoke": TaskSettings(task={}, nearby=0, **FEW),
        "cpu": TaskSettings(task={}, nearby=0, steps=2_000, batch_size=16, learning_rate=1e-3),
        "gpu": TaskSettings(task={}, nearby=0, steps=20_000, batch_size=128, learning_rate=1e-3),
        "paper": _paper({}, 35_000, 175, batch_size=256, test_rows=10_000),
    },
)
