"""A task in a folder: `task.json`, and files of rows where they are not made from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysketch.data import TokenizerLike
from polysketch.data.description import DESCRIPTION_FILE, DataDescription, TokenizerDescription
from polysketch.storage import whole_folder
from polysketch.storage.strict_json import encoded
from polysketch.storage.sums import sha256_of
from polysketch.tasks.answered import AnsweredRows, SequenceAnswers
from polysketch.tasks.base import GeneratedTask, Task
from polysketch.tasks.description import FORMAT, TASK_FILE, VERSION, read_task_description
from polysketch.tasks.registry import TASKS, task_class
from polysketch.tasks.row_files import read_rows, write_rows
from polysketch.tasks.stored import Classification, ClassifiedRows
from polysketch.tasks.stored_task import StoredTask

_STORED: dict[str, tuple[type[StoredTask[Any]], type[Any]]] = {
    Classification.name: (Classification, ClassifiedRows),
    SequenceAnswers.name: (SequenceAnswers, AnsweredRows),
}
"""Tasks of rows out of files, by name, and what a split of each is."""

TOKENIZER_FOLDER = "tokenizer"
"""In the folder of a task whose rows are texts: the tokenizer that made them."""


def write_task(task: Task, out: str | Path, *, tokenizer: TokenizerLike | None = None) -> None:
    """Write a task as a new folder, which appears whole or not at all.

    Args:
        task: made from a seed, or rows out of files.
        out: the folder.
        tokenizer: what made the rows of texts, to be kept with them.

    Raises:
        FileExistsError: `out` holds something.
        TypeError: a task that has neither options nor rows to write.
    """
    if not isinstance(task, GeneratedTask | StoredTask):
        raise TypeError(f"expected a generated task or stored rows, got {type(task).__name__}")
    with whole_folder(Path(out)) as folder:
        splits = task.splits if isinstance(task, StoredTask) else {}
        files = {split: write_rows(rows, folder, split) for split, rows in splits.items()}
        described = {split: {name: sha256_of(folder / name) for name in names} for split, names in files.items()}
        value = {"format": FORMAT, "version": VERSION, "task": task.name, "options": task.options()}
        (folder / TASK_FILE).write_bytes(encoded({**value, "splits": described}, indent=2))
        if tokenizer is not None:
            _keep_tokenizer(tokenizer, folder / TOKENIZER_FOLDER)


def _keep_tokenizer(tokenizer: TokenizerLike, folder: Path) -> None:
    folder.mkdir()
    tokenizer.save(folder)
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    DataDescription(TokenizerDescription.of(tokenizer), dtype, {}, ()).write(folder / DESCRIPTION_FILE)


def open_task(folder: str | Path) -> Task:
    """The task in a folder; files of rows are mapped, not read.

    Raises:
        FileNotFoundError: no task, or a file of its rows is missing.
        ValueError: it is damaged, or of another version.
    """
    folder = Path(folder)
    found = read_task_description(folder)
    options, name = dict(found["options"]), found["task"]
    if name not in (*TASKS, *_STORED):
        raise ValueError(f"{folder}: expected one of the tasks {', '.join(TASKS)}, found {name!r}")
    try:
        if name in TASKS:
            return task_class(name)(**options)
        _require_types(options)
        kind, of_rows = _STORED[name]
        return kind({split: read_rows(of_rows, folder, split) for split in found["splits"]}, **options)
    except TypeError as error:
        raise ValueError(f"{folder / TASK_FILE}: expected the sizes of {name}, found others: {error}") from error


def _require_types(options: Mapping[str, Any]) -> None:
    """Refuse options of stored rows that are not of their types; a file may say anything.

    Raises:
        TypeError: names one.
    """
    kinds: dict[str, Any] = {"vocab_size": int, "class_names": list, "alphabet": str, "documents": int, "end": int}
    kinds |= {"patch_size": int | None, "shape": list | None}
    for name, kind in kinds.items():
        if name in options and not isinstance(options[name], kind):
            raise TypeError(f"{name} is {options[name]!r:.40}")


def verify_task(folder: str | Path) -> None:
    """Read all files of rows and compare their sha256.

    Raises:
        FileNotFoundError, ValueError: as `open_task`.
        ValueError: a file was altered; it is named.
    """
    folder = Path(folder)
    open_task(folder)  # files that do not fit one another may be terabytes of nothing
    for files in read_task_description(folder)["splits"].values():
        for name, sha256 in files.items():
            require_rows_file(folder, name, sha256)


def require_rows_file(folder: Path, name: str, sha256: str) -> None:
    """Compare one file of rows with what was written.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it was altered.
    """
    if not (folder / name).is_file():  # nor a pipe, which would be waited for
        raise FileNotFoundError(f"{folder / name} is missing: expected the file that was written")
    if sha256_of(folder / name) != sha256:
        raise ValueError(f"{folder / name}: expected the file that was written, found it altered")
