"""Checkpoints that a kill, a power cut or a full disk cannot spoil.

A checkpoint is a folder `step-NNNNNNNN` of safetensors files, a JSON file and a manifest of sha256 sums. It is made
under a temporary name, every file is synced, and only then does the folder get its name; older checkpoints go after
that. So at any moment the newest folder with a proper name is complete. Nothing is ever unpickled.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polysketch.extras import require
from polysketch.storage import disk
from polysketch.training.manifest import MANIFEST, describe, manifest_bytes, read_verified

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RANDOM_FILE = "random.safetensors"
STATE_FILE = "state.json"

_NAME = re.compile(r"step-(\d{8,})")
_SET_ASIDE = "set-aside"


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on.

    Attributes:
        model: the model's state_dict by name.
        optimizer: the optimizer's state, see `tensors.optimizer_tensors`.
        random: the generators' states, see `tensors.random_tensors`.
        state: what else counts, JSON values: at least `step`, the number of optimizer steps made.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    state: Mapping[str, Any]


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def checkpoint_step(path: Path) -> int:
    """The step that a checkpoint folder's name tells."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name!r} is not the name of a checkpoint: expected one like {checkpoint_name(100)}")
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first; leftovers of interrupted operations are not among them."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=checkpoint_step)


def find_checkpoint(folder: Path, name: str = "latest") -> Path:
    """The checkpoint called `name` in `folder`.

    Args:
        folder: the checkpoints folder of a run.
        name: a folder name such as `step-00000100`, or `latest`.

    Raises:
        FileNotFoundError: there is no such checkpoint; the message lists those that exist.
    """
    found = {path.name: path for path in list_checkpoints(folder)}
    if found and name == "latest":
        return list(found.values())[-1]
    if name not in found:
        there = ", ".join(found) or "none"
        raise FileNotFoundError(
            f"no checkpoint {name!r} in {folder}: found {there}; a run saves its first one at the start"
        )
    return found[name]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a checkpoint, then delete all but the newest `keep`.

    Costs, while it runs, as much memory as the largest of its files. If it is interrupted anywhere, or fails, the
    checkpoints that were complete before are untouched or the new one is complete.

    Args:
        folder: the checkpoints folder of a run, which exists.
        checkpoint: what to write; its step gives the name.
        keep: number of checkpoints to keep, at least 1.

    Returns:
        The new checkpoint's folder.

    Raises:
        OSError: a file operation failed, for instance because the disk is full.
    """
    target = folder / checkpoint_name(checkpoint.state["step"])
    temporary = disk.temporary_name(target)
    delete_leftovers(folder)
    disk.make_folder(temporary)
    _write_files(temporary, checkpoint)
    disk.publish_folder(temporary, target)
    _delete_older(folder, keep)
    return target


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    entries = {}
    for name, data in _serialised(checkpoint):
        disk.write(folder / name, data)
        entries[name] = describe(data)
    disk.write(folder / MANIFEST, manifest_bytes(entries))


def _serialised(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    """The files of a checkpoint one after the other, so that only one of them is in memory at a time."""
    safetensors = require("safetensors.torch")
    tensors = {MODEL_FILE: checkpoint.model, OPTIMIZER_FILE: checkpoint.optimizer, RANDOM_FILE: checkpoint.random}
    for name, content in tensors.items():
        yield name, safetensors.save({key: value.detach().cpu().contiguous() for key, value in content.items()})
    yield STATE_FILE, json.dumps(dict(checkpoint.state), indent=2).encode() + b"\n"


def _delete_older(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep`: first the names, then the content, so that no named one is ever half there."""
    doomed = list_checkpoints(folder)[:-keep]
    for path in doomed:
        disk.rename(path, disk.temporary_name(path))
    if doomed:
        disk.sync(folder)
    delete_leftovers(folder)


def delete_leftovers(folder: Path) -> None:
    """Delete what interrupted operations left in a checkpoints folder."""
    for path in sorted(folder.iterdir()):
        if disk.is_temporary(path):
            disk.delete_tree(path)


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints later than `step`, so that a run goes on from there without deleting anything.

    Returns:
        The new folders, `set-aside-NAME`, which no command looks at again; the user may delete them.
    """
    moved = []
    for path in list_checkpoints(folder):
        if checkpoint_step(path) > step:
            target = _free_name(path.with_name(f"{_SET_ASIDE}-{path.name}"))
            disk.rename(path, target)
            moved.append(target)
    if moved:
        disk.sync(folder)
    return moved


def _free_name(path: Path) -> Path:
    candidates = (path.with_name(f"{path.name}-{number}") if number else path for number in itertools.count())
    return next(candidate for candidate in candidates if not candidate.exists())


def load_model_tensors(path: Path) -> dict[str, Tensor]:
    """The model's tensors of the checkpoint folder `path`, on the CPU; only that file is read and verified.

    Raises:
        FileNotFoundError, ValueError: the checkpoint is incomplete or altered, see `manifest.read_verified`.
    """
    return _load_tensors(path, MODEL_FILE)


def load_state(path: Path) -> dict[str, Any]:
    """The JSON state of the checkpoint folder `path`; errors as in `load_model_tensors`."""
    try:
        state = json.loads(read_verified(path, STATE_FILE))
        well_formed = state["step"] == checkpoint_step(path) and state.get("seconds", 0.0) >= 0 <= state.get(
            "tokens", 0
        )
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        well_formed = False
    if not well_formed:
        raise ValueError(
            f"{path / STATE_FILE}: expected the state of step {checkpoint_step(path)}, found something else: "
            "the folder was renamed, or the file altered by hand"
        )
    return state


def load_checkpoint(path: Path) -> Checkpoint:
    """Everything in the checkpoint folder `path`, on the CPU, every byte verified.

    Raises:
        FileNotFoundError, ValueError: as in `load_model_tensors`.
    """
    return Checkpoint(
        model=load_model_tensors(path),
        optimizer=_load_tensors(path, OPTIMIZER_FILE),
        random=_load_tensors(path, RANDOM_FILE),
        state=load_state(path),
    )


def _load_tensors(path: Path, name: str) -> dict[str, Tensor]:
    data = read_verified(path, name)
    require("safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except SafetensorError as error:
        raise ValueError(
            f"{path / name}: expected a safetensors file, found something else ({error}): "
            "it was replaced together with its checksum, or written by another version"
        ) from error
