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
        """The inverse of ``to_dict``, through JSON."""
        rows = tuple((source, split, count) for source, split, count in values["rows"])
        return cls(**values | {"rows": rows})


BEGINNING = Place()
