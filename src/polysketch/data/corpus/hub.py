"""Datasets of the `datasets` library, by name, streamed: one of the Hub is downloaded as it is read, no sooner."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polysketch.data.corpus.document import ReadOptions, text_of_row
from polysketch.data.corpus.readers import RawDocument
from polysketch.data.corpus.recipes import RECIPES
from polysketch.data.splits import SPLIT_NAMES
from polysketch.extras import require

HUB_PREFIX = "hf:"


@dataclass(frozen=True)
class NamedDataset:
    """A dataset to stream.

    Attributes:
        source: As the user named it, for messages.
        location: Name on the Hub, or a local folder of data files.
        config: Its configuration, None for the only one.
        text_field: The column that holds the text; None for that of the options.
    """

    source: str
    location: str
    config: str | None
    text_field: str | None


def named_dataset(source: str, mirror: Path | None = None) -> NamedDataset | None:
    """The dataset that a source names, ``pg19`` (see ``RECIPES``) or ``hf:NAME[:CONFIG]``; None when it is a path.

    Args:
        source: What the user wrote.
        mirror: Folder in which datasets lie under their names on the Hub, to be read instead of the Hub.

    Raises:
        FileNotFoundError: The mirror does not have the dataset.
        ValueError: There is no name after ``hf:``, or the name of a recipe is that of a file, too.
    """
    if source in RECIPES:
        if Path(source).exists():
            raise ValueError(
                f"expected {source} to be a dataset or a path, found both: write ./{source} for the path, or "
                f"{HUB_PREFIX}{RECIPES[source].hub_name} for the dataset"
            )
        recipe = RECIPES[source]
        found = NamedDataset(source, recipe.hub_name, recipe.config, recipe.text_field)
    elif source.startswith(HUB_PREFIX):
        name, _, config = source.removeprefix(HUB_PREFIX).partition(":")
        if not name:
            raise ValueError(f"expected hf:NAME or hf:NAME:CONFIG, found {source!r}")
        found = NamedDataset(source, name, config or None, None)
    else:
        return None
    return found if mirror is None else _in_mirror(found, mirror)


def _in_mirror(dataset: NamedDataset, mirror: Path) -> NamedDataset:
    folder = mirror / dataset.location
    if not folder.is_dir():
        raise FileNotFoundError(
            f"expected the files of {dataset.source} in {folder}, found no such folder: bring them with "
            f"hf download {dataset.location} --repo-type dataset --local-dir {folder}"
        )
    return dataclasses.replace(dataset, location=str(folder))


def read_dataset(
    dataset: NamedDataset, options: ReadOptions, splits: Collection[str] | None = None
) -> Iterator[tuple[str | None, Iterator[RawDocument]]]:
    """The splits of a dataset, each with its raw documents; a split that is not read costs nothing.

    A dataset of a single split leaves the split to the hash (None). Of several, those called train, validation (valid,
    val, dev) or test are given, in that order.

    Args:
        dataset: Which.
        options: How its rows are read.
        splits: Only these; None for all.

    Raises:
        FileNotFoundError: There is no such dataset.
        ConnectionError: The Hub cannot be reached.
        ValueError: It has no such configuration, no split of a known name, or no such text field; or it is a program.
        ImportError: The extra ``hf`` is missing.
    """
    if dataset.text_field is not None:
        options = dataclasses.replace(options, text_field=dataset.text_field)
    loaded = _load(dataset)
    for theirs, ours in _splits(list(loaded), dataset.source):
        if splits is None or ours is None or ours in splits:
            yield ours, _rows(loaded[theirs], f"{dataset.source} {theirs}", options)


def _load(dataset: NamedDataset) -> Any:
    try:
        return require("datasets").load_dataset(dataset.location, dataset.config, streaming=True)
    except ConnectionError as error:
        raise ConnectionError(
            f"expected to reach {dataset.location} on the Hugging Face Hub, found no way to it ({error}): connect, or "
            "read a copy on this machine with --mirror"
        ) from error
    except RuntimeError as error:
        raise ValueError(f"expected data files in {dataset.location}, found something else: {error}") from error


def _rows(rows: Any, place: str, options: ReadOptions) -> Iterator[RawDocument]:
    for number, row in enumerate(rows):
        yield f"{place} row {number}", text_of_row(row, options, f"{place} row {number}")


def _splits(names: list[str], source: str) -> list[tuple[str, str | None]]:
    """Pairs of the dataset's name of a split and ours."""
    if len(names) == 1:
        return [(names[0], None)]
    known: list[tuple[str, str | None]] = [(name, SPLIT_NAMES[name]) for name in SPLIT_NAMES if name in names]
    if not known:
        raise ValueError(f"expected splits of {', '.join(SPLIT_NAMES)} in {source}, found {', '.join(names)}")
    return known
