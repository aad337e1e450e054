"""How far a preparation is: written into the unfinished folder now and then, read by the one that goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polysketch.data.corpus import Corpus, Place
from polysketch.data.corpus.cutting import CUTTING
from polysketch.data.description import RECORD_FILE, SplitDescription, TokenizerDescription
from polysketch.data.writer import SplitWriter
from polysketch.storage import disk
from polysketch.storage.outside import read_object

# What a kill costs at most; each time everything written is waited for to be on the disk.
SECONDS_BETWEEN = 30.0


@dataclass(frozen=True)
class Record:
    """What a preparation had done when it was recorded.

    Attributes:
        tokenizer: The tokenizer, whose file is in the folder.
        place: How far the sources were read.
        splits: What was written of each split, all of it on the disk.
    """

    tokenizer: TokenizerDescription
    place: Place
    splits: dict[str, SplitDescription]


class Keeper:
    """Writes records of one job into its folder."""

    def __init__(self, folder: Path, job: Mapping[str, Any], tokenizer: TokenizerDescription) -> None:
        """Begin.

        Args:
            folder: The unfinished folder.
            job: All that the result depends on, JSON values.
            tokenizer: The tokenizer, saved in the folder.
        """
        self._folder = folder
        self._job = dict(job)
        self._tokenizer = tokenizer
        self._last = time.monotonic()

    def keep(self, place: Place, writers: Mapping[str, SplitWriter]) -> None:
        """Record that the sources are written up to a place, if the last record is half a minute old.

        Raises:
            OSError: The disk is full; the record before stays.
        """
        if time.monotonic() - self._last < SECONDS_BETWEEN:
            return
        if self._tokenizer.file is not None:
            disk.sync(self._folder / self._tokenizer.file)
        record = {
            "job": self._job,
            "tokenizer": asdict(self._tokenizer),
            "place": place.to_dict(),
            "cutting": CUTTING,
            "splits": {name: asdict(writer.commit()) for name, writer in writers.items()},
        }
        disk.replace_file(self._folder / RECORD_FILE, json.dumps(record, indent=2).encode() + b"\n")
        self._last = time.monotonic()

    def drop(self) -> None:
        """Forget what was recorded: the job, gone on with, would fail again."""
        path = self._folder / RECORD_FILE
        if path.exists():
            disk.delete(path)


def read_record(folder: Path, job: Mapping[str, Any], corpus: Corpus) -> Record | None:
    """What was done in a folder of the same job; None in one where nothing was recorded.

    Args:
        folder: The unfinished folder.
        job: All that the result depends on, JSON values.
        corpus: The sources.

    Raises:
        FileExistsError: It is of another job, or a file that was read has changed since.
    """
    path = folder / RECORD_FILE
    if not path.exists():
        return None
    values = read_object(path, "job", "place", "splits", "tokenizer")
    job = json.loads(json.dumps(job))
    try:
        changed = [name for name in job if values["job"].get(name) != job[name]]
        place = Place.from_dict(values["place"])
        splits = {name: _split(split) for name, split in values["splits"].items()}
        tokenizer = TokenizerDescription.from_dict(values["tokenizer"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: expected a record of unfinished work, found another: delete {folder}") from error
    if not changed and job.get("cut_text") and values.get("cutting") != CUTTING:
        changed = ["cutting"]
    if not changed and not corpus.still_has(place):
        changed = ["a file that was read already"]
    if changed:
        raise FileExistsError(
            f"expected the unfinished work in {folder} to be of the same command and files, found another "
            f"{', '.join(changed)}: give the same to go on, or delete {folder} to begin anew"
        )
    return Record(tokenizer, place, splits)


def _split(values: dict[str, Any]) -> SplitDescription:
    return SplitDescription.from_dict(values | {"shards": list(values["shards"])})
