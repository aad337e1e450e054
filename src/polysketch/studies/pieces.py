"""A run in pieces: each is kept as soon as it is made, so that a run that was killed goes on after the last one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polysketch.studies.kept import kept_or_made

Measurements = list[dict[str, Any]]


def in_pieces(
    folder: Path, depends_on: Mapping[str, Any], pieces: Mapping[str, Callable[[], Measurements]]
) -> Measurements:
    """The measurements of all pieces, one after the other.

    Args:
        folder: of the run.
        depends_on: what the run's record depends on.
        pieces: name of a file -> makes it.

    Raises:
        ValueError: a piece that is there was made with other settings.
    """
    found: Measurements = []
    for name, make in pieces.items():
        record = kept_or_made(folder / f"{name}.json", depends_on, lambda make=make: {"measurements": make()})  # type: ignore[misc]
        found += record["measurements"]
    return found
