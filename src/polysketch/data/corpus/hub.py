"""Datasets of the `datasets` library, by name, streamed: one of the Hub is downloaded as it is read, no sooner."""

from __future__ import annotations

from collections.abc import Iterator

from polysketch.data.corpus.document import ReadOptions, text_of_row
from polysketch.data.corpus.readers import RawDocument
from polysketch.data.extras import require
from polysketch.data.splits import SPLIT_NAMES

HUB_PREFIX = "hf:"


def read_dataset(source: str, options: ReadOptions) -> Iterator[tuple[RawDocument, str | None]]:
    """The raw documents of ``hf:NAME`` or ``hf:NAME:CONFIG``, each with the split the dataset gives it.

    NAME is a dataset of the Hugging Face Hub, or a local folder of data files. A dataset of a single split leaves the
    split to the hash. Of several, those called train, validation (valid, val, dev) or test are read, in that order.

    Raises:
        FileNotFoundError: There is no such dataset, or it cannot be reached.
        ValueError: It has no such configuration, no split of a known name, or no such text field.
        ImportError: The extra ``hf`` is missing.
    """
    name, _, config = source.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise ValueError(f"expected hf:NAME or hf:NAME:CONFIG, found {source!r}")
    datasets = require("datasets", "hf")
    dataset = datasets.load_dataset(name, config or None, streaming=True)
    for dataset_split, split in _splits(list(dataset), source):
        for number, row in enumerate(dataset[dataset_split]):
            place = f"{source} {dataset_split} row {number}"
            yield (place, text_of_row(row, options, place)), split


def _splits(names: list[str], source: str) -> list[tuple[str, str | None]]:
    """Pairs of the dataset's name of a split and ours."""
    if len(names) == 1:
        return [(names[0], None)]
    known: list[tuple[str, str | None]] = [(name, SPLIT_NAMES[name]) for name in SPLIT_NAMES if name in names]
    if not known:
        raise ValueError(f"expected splits of {', '.join(SPLIT_NAMES)} in {source}, found {', '.join(names)}")
    return known
