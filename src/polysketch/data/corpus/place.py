"""How far a corpus has been read, so that another process can go on from there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """A place between two documents of a corpus.

    Attributes:
        part: Number of the file or dataset that is being read.
        section: Number of the dataset's split in it; 0 in a file.
        row: Raw documents read of the section.
        sources: Fingerprint of the parts up to this one: names, sizes and times of files.
        source_bytes: Bytes read from files.
        text_bytes: Bytes of text of the documents so far.
        rows: Raw documents read, by number of the source and split; what ``Selection.max_documents`` limits.
        skipped: Documents left out, by reason.
        split_by_hash: Whether the hash decided the split of a document.
    """

    part: int = -1
    section: int = 0
    row: int = 0
    sources: str = ""
    source_bytes: int = 0
    text_bytes: int = 0
    rows: tuple[tuple[int, str | None, int], ...] = ()
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    split_by_hash: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Place:
        """The inverse of ``to_dict``, through JSON.

        Raises:
            TypeError: A field is unknown, or of another type.
            KeyError, ValueError: Rows are missing, or others.
        """
        rows = tuple((source, split, count) for source, split, count in values["rows"])
        place = cls(**values | {"rows": rows})
        numbers = [place.part, place.section, place.row, place.source_bytes, place.text_bytes]
        numbers += [number for source, _, count in rows for number in (source, count)]
        texts = [place.sources, *(split for _, split, _ in rows if split is not None)]
        well_typed = all(isinstance(number, int) for number in numbers) and all(isinstance(text, str) for text in texts)
        if not well_typed or not isinstance(place.skipped, dict):
            raise TypeError("expected the place of a preparation, found fields of other types")
        return place


BEGINNING = Place()
