"""The task.json of a task folder, read without PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polysketch.storage.outside import read_object
from polysketch.storage.sums import sha256_of

TASK_FILE = "task.json"
FORMAT, VERSION = "polysketch-task", 1


def is_task(folder: str | Path) -> bool:
    """Whether a folder holds a task."""
    return (Path(folder) / TASK_FILE).is_file()


def read_task_description(folder: str | Path) -> dict[str, Any]:
    """What task.json says: `task`, its name; `options`; `splits`, the files of each with their sha256.

    Raises:
        FileNotFoundError: no task.
        ValueError: it is damaged, or of another version.
    """
    if not is_task(folder):
        raise FileNotFoundError(f"expected a folder with {TASK_FILE}, made by polysketch task, found none in {folder}")
    path = Path(folder) / TASK_FILE
    try:
        found = read_object(path)
        known = (found["format"], found["version"]) == (FORMAT, VERSION) and {"task", "options", "splits"} <= {*found}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected a description of a task in {path}, found something else") from error
    if not known:
        raise ValueError(f"{path}: expected a task of version {VERSION}, found {found.get('version')!r}")
    _check_form(found, path)
    return found


def _check_form(found: dict[str, Any], path: Path) -> None:
    """Refuse other kinds of values, splits that are none and files that lie elsewhere."""
    splits = found["splits"]
    well_formed = isinstance(found["task"], str) and isinstance(found["options"], dict) and isinstance(splits, dict)
    if not well_formed or not all(isinstance(files, dict) for files in splits.values()):
        raise ValueError(f"{path}: expected the name of a task, its options and its files, found something else")
    for name in (*splits, *(name for files in splits.values() for name in files)):
        if Path(name).name != name:
            raise ValueError(f"{path}: expected plain names of splits and files, found {name!r}")


def task_digest(folder: str | Path) -> str:
    """SHA-256 of a folder's task.json, which holds those of its other files."""
    return sha256_of(Path(folder) / TASK_FILE)
