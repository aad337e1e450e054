"""The rows of a split in files: one for each array of theirs, mapped when it is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

_DTYPES: dict[str, Any] = {
    "ids": np.dtype("<u4"),
    "ends": np.dtype("<i8"),
    "classes": np.dtype("<u4"),
    "answers": np.dtype("<i8"),
    "answer_ends": np.dtype("<i8"),
}
"""By the name of an array."""


def write_rows(rows: Any, folder: Path, split: str) -> list[str]:
    """Write a split into files of a folder; returns their names."""
    names = []
    for field in dataclasses.fields(rows):
        name = f"{split}.{field.name}.bin"
        array = np.ascontiguousarray(getattr(rows, field.name), dtype=_DTYPES[field.name])
        (folder / name).write_bytes(array.tobytes())
        names.append(name)
    return names


def read_rows(kind: type[Any], folder: Path, split: str) -> Any:
    """Open a split that `write_rows` wrote; arrays are mapped, not read.

    Args:
        kind: the dataclass of the rows: a `StoredRows`.
        folder, split: as they were written.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file was cut short.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    rows = kind(*(_mapped(folder / f"{split}.{name}.bin", _DTYPES[name]) for name in names))
    if not rows.fit_together():
        raise ValueError(f"{folder}: expected files of {split} that belong together, found one cut short or exchanged")
    return rows


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"expected the file {path}, found nothing: the folder was copied incompletely")
    size, of_each = path.stat().st_size, np.dtype(dtype).itemsize
    if size % of_each:
        raise ValueError(f"expected {path} of whole numbers of {of_each} bytes, found {size}: it was cut short")
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)
