"""Checkpoints that a kill, a power cut or a full disk cannot spoil.

A checkpoint is a folder `step-NNNNNNNN` of safetensors files, a JSON file and a manifest of sha256 sums. It is made
under a temporary name, every file is synced, and only then does the folder get its name; older checkpoints go after
that. So at any moment the newest folder with a proper name is complete. Nothing is ever unpickled.

One process writes `model.safetensors`. Of several, each writes its pieces, `model-00001-of-00004.safetensors` and so
on, and the first commits them all. Any number of processes reads either.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polysketch.extras import require
from polysketch.storage import disk
from polysketch.storage.outside import decoded
from polysketch.training.manifest import MANIFEST, describe, files_in, manifest_bytes, read_verified

if TYPE_CHECKING:
    from torch import Tensor

    from polysketch.distributed.pieces import Piece
    from polysketch.distributed.processes import Processes

_MODEL, _OPTIMIZER, _RANDOM, _CARRIED = "model", "optimizer", "random", "carried"

MODEL_FILE = f"{_MODEL}.safetensors"
OPTIMIZER_FILE = f"{_OPTIMIZER}.safetensors"
RANDOM_FILE = f"{_RANDOM}.safetensors"
CARRIED_FILE = f"{_CARRIED}.safetensors"
STATE_FILE = "state.json"

LATEST, BEST = "latest", "best"
"""Names that stand for a checkpoint: the newest, and the one of the evaluation with the least loss. The state of every
checkpoint says under the second which step that is, as far as is known at its step."""

_NAME = re.compile(r"step-(\d{8,})")
_SET_ASIDE = "set-aside"


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on.

    Attributes:
        model: the model's state_dict by name; of several processes, each has its shares of the tensors.
        optimizer: the optimizer's state, see `tensors.optimizer_tensors`.
        random: the generators' states, see `tensors.random_tensors`.
        state: what else counts, JSON values: at least `step`, the number of optimizer steps made.
        carried: the states of documents that go on, by names with the lane first; of several processes, each has those
            of its lanes. None for a run without lanes. `load_carried` reads them.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    random: Mapping[str, Tensor]
    state: Mapping[str, Any]
    carried: Mapping[str, Tensor] | None = None

    def copied(self) -> Checkpoint:
        """The same in host memory of its own; of tensors that several processes share, this one's shares."""
        carried = None if self.carried is None else _copied(self.carried)
        return Checkpoint(_copied(self.model), _copied(self.optimizer), _copied(self.random), dict(self.state), carried)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from polysketch.distributed.shares import local  # loads PyTorch

    return {name: local(tensor).detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


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


def find_checkpoint(folder: Path, name: str = LATEST) -> Path:
    """The checkpoint called `name` in `folder`.

    Args:
        folder: the checkpoints folder of a run.
        name: a folder name such as `step-00000100`, `latest`, or `best`: that of the evaluation with the least loss.

    Raises:
        FileNotFoundError: there is no such checkpoint; the message lists those that exist.
        ValueError: `best` of a run of which the newest checkpoint is altered.
    """
    found = {path.name: path for path in list_checkpoints(folder)}
    if found and name == LATEST:
        return list(found.values())[-1]
    if found and name == BEST:
        return _find_best(folder)
    if name not in found:
        there = ", ".join(found) or "none"
        raise FileNotFoundError(
            f"no checkpoint {name!r} in {folder}: found {there}; a run saves its first one at the start"
        )
    return found[name]


def _find_best(folder: Path) -> Path:
    """The checkpoint that the newest one calls the best; while a run goes on, either may be deleted in between."""
    while True:
        found = list_checkpoints(folder)
        if not found:
            raise FileNotFoundError(f"no checkpoint {BEST!r} in {folder}: found none; they were there a moment ago")
        try:
            name = _best_name(load_state(found[-1]))
        except (FileNotFoundError, ValueError):
            if found[-1].is_dir():
                raise
            continue
        if name is None:
            raise FileNotFoundError(
                f"no checkpoint {BEST!r} in {folder}: found {', '.join(path.name for path in found)}; a run has one "
                "after its first evaluation (--eval-every), but for one with --no-keep-best, and for `convert`"
            )
        if (folder / name).is_dir():
            return folder / name
        if list_checkpoints(folder) == found:
            raise FileNotFoundError(
                f"no checkpoint {BEST!r} in {folder}: {name}, which {found[-1].name} names, is missing; found "
                f"{', '.join(path.name for path in found)}"
            )


def _best_name(state: Mapping[str, Any]) -> str | None:
    """The name of the best checkpoint, as the state of a checkpoint has it."""
    return checkpoint_name(state[BEST]["step"]) if BEST in state else None


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a checkpoint, then delete all but the newest `keep` and the best.

    Costs, while it runs, as much memory as the largest of its files. If it is interrupted anywhere, or fails, the
    checkpoints that were complete before are untouched or the new one is complete.

    Args:
        folder: the checkpoints folder of a run, which exists.
        checkpoint: what to write; its step gives the name, and its state may say which one is the best.
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
    _write_files(temporary, _serialised(checkpoint), {})
    disk.publish_folder(temporary, target)
    _delete_older(folder, keep, _best_name(checkpoint.state))
    return target


def save_shared_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    copy: Checkpoint,
    *,
    keep: int,
    processes: Processes,
    group: Any,
    before: Callable[[], None],
) -> Path:
    """As `save_checkpoint`, of tensors that several processes have shares of; each of them must call this.

    Each process writes its shares, and of what all have a part. The first one writes the rest and commits. Tensors of
    `checkpoint` are asked for their shapes and shares alone, so they may change meanwhile.

    Args:
        folder: the checkpoints folder of a run, on a file system that all processes share.
        checkpoint: says how tensors are shared out.
        copy: what to write of it; random states and the rest are those of the first process.
        keep: number of checkpoints to keep, at least 1.
        processes: all of them.
        group: for their collectives; nothing else may use it meanwhile.
        before: what the first process is to do before a file is written.

    Raises:
        OSError: a file operation failed on one of them; its message names the rank.
    """
    from polysketch.distributed.storage import PieceWriter, save_pieces

    target = folder / checkpoint_name(copy.state["step"])
    temporary = disk.temporary_name(target)

    def begin() -> None:
        before()
        delete_leftovers(folder)
        disk.make_folder(temporary)

    def write(name: str, data: bytes) -> dict[str, int | str]:
        disk.write(temporary / name, data)
        disk.sync(temporary / name)
        return describe(data)

    def commit(entries: Mapping[str, Any]) -> None:
        _write_files(temporary, _rest(copy), entries)
        disk.publish_folder(temporary, target)
        _delete_older(folder, keep, _best_name(copy.state))

    kinds = (_MODEL, _OPTIMIZER) if copy.carried is None else (_MODEL, _OPTIMIZER, _CARRIED)
    writer = PieceWriter(
        kinds, _by_kind(copy), processes.rank, processes.count, begin=begin, write=write, commit=commit
    )
    save_pieces(_by_kind(checkpoint), writer, group)
    return target


def _by_kind(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors under names `KIND/NAME`."""
    kinds = {_MODEL: checkpoint.model, _OPTIMIZER: checkpoint.optimizer, _CARRIED: checkpoint.carried or {}}
    return {f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def _write_files(
    folder: Path, files: Iterable[tuple[str, bytes]], written: Mapping[str, Mapping[str, int | str]]
) -> None:
    """Write files, and a manifest of them and of those that are there already."""
    entries = dict(written)
    for name, data in files:
        disk.write(folder / name, data)
        entries[name] = describe(data)
    disk.write(folder / MANIFEST, manifest_bytes(entries))


def _serialised(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    """The files of a checkpoint one after the other, so that only one of them is in memory at a time."""
    yield _safetensors(MODEL_FILE, checkpoint.model)
    yield _safetensors(OPTIMIZER_FILE, checkpoint.optimizer)
    if checkpoint.carried is not None:
        yield _safetensors(CARRIED_FILE, checkpoint.carried)
    yield from _rest(checkpoint)


def _rest(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    """The files that one process writes whole, however many there are."""
    yield _safetensors(RANDOM_FILE, checkpoint.random)
    yield STATE_FILE, json.dumps(dict(checkpoint.state), indent=2).encode() + b"\n"


def _safetensors(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, bytes]:
    content = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    return name, require("safetensors.torch").save(content)


def _delete_older(folder: Path, keep: int, best: str | None) -> None:
    """Delete all but the newest `keep` and the best.

    First the names go, then the content, so that no named one is ever half there.
    """
    doomed = [path for path in list_checkpoints(folder)[:-keep] if path.name != best]
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
    """The model's tensors of the checkpoint folder `path`, whole, on the CPU; only they are read and verified.

    Raises:
        FileNotFoundError, ValueError: the checkpoint is incomplete or altered, see `manifest.read_verified`.
    """
    return _load_tensors(path, _MODEL)


def load_carried(path: Path) -> dict[str, Tensor]:
    """The states of documents that go on, of all lanes, on the CPU; errors as in `load_model_tensors`."""
    return _load_tensors(path, _CARRIED)


def load_state(path: Path) -> dict[str, Any]:
    """The JSON state of the checkpoint folder `path`; errors as in `load_model_tensors`."""
    content = read_verified(path, STATE_FILE)
    try:
        state = decoded(content, path / STATE_FILE)
        well_formed = _is_state_of(state, checkpoint_step(path))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        well_formed = False
    if not well_formed:
        raise ValueError(
            f"{path / STATE_FILE}: expected the state of step {checkpoint_step(path)}, found something else: "
            "the folder was renamed, or the file altered by hand"
        )
    return state


def _is_state_of(state: Any, step: int) -> bool:
    """Whether the JSON values are a state of that step; a KeyError or TypeError says no as well."""
    if state["step"] != step or not state.get("seconds", 0.0) >= 0 <= state.get("tokens", 0):
        return False
    return BEST not in state or _is_best(state[BEST], step)


def _is_best(best: Any, step: int) -> bool:
    measured = best.get("measured")
    return 0 <= best["step"] <= step and math.isfinite(best["loss"]) and isinstance(measured, dict | None)


def require_bound(path: Path, state: Mapping[str, Any], identity: str | None) -> None:
    """Refuse a checkpoint of another run, which somebody copied here.

    Args:
        path: its folder.
        state: its JSON state.
        identity: of the run in whose folder it lies, see `LoopFolder.identity`.

    Raises:
        ValueError: the checkpoint says another one.
    """
    if state.get("run") != identity:
        raise ValueError(
            f"{path}: expected a checkpoint of the run in this folder ({_short(identity)}), found one of another "
            f"({_short(state.get('run'))}): it was copied here; for its weights alone give its run as --init-from"
        )


def _short(identity: Any) -> str:
    return str(identity)[:8] if identity is not None else "none"


def load_checkpoint(path: Path) -> Checkpoint:
    """Everything in the checkpoint folder `path`, on the CPU, every byte verified.

    Raises:
        FileNotFoundError, ValueError: as in `load_model_tensors`.
    """
    return Checkpoint(
        model=load_model_tensors(path),
        optimizer=_load_tensors(path, _OPTIMIZER),
        random=_load_tensors(path, _RANDOM),
        state=load_state(path),
    )


def load_shared_checkpoint(
    path: Path, *, model: Callable[[str, Piece], Tensor], optimizer: Callable[[str, Piece], Tensor]
) -> Checkpoint:
    """As `load_checkpoint`, each process its shares of the tensors; all must call this.

    A process reads, and verifies, the files that hold something of its shares.

    Args:
        path: the checkpoint folder.
        model: gives, for a name and the whole tensor's shape and dtype, the tensor to fill with it.
        optimizer: likewise.
    """
    from polysketch.distributed.pieces import parse_tensors, read_pieces
    from polysketch.distributed.storage import PieceReader, load_pieces

    files = {kind: [path / name for name in files_in(path, kind)] for kind in (_MODEL, _OPTIMIZER)}
    makers = {_MODEL: model, _OPTIMIZER: optimizer}
    found = {
        (kind, name): makers[kind](name, piece)
        for kind in files
        for file in files[kind]
        for name, piece in read_pieces(file).items()
    }
    reader = PieceReader(files, lambda file: parse_tensors(read_verified(path, file.name), file))
    load_pieces({f"{kind}/{name}": tensor for (kind, name), tensor in found.items()}, reader)
    return Checkpoint(
        model={name: tensor for (kind, name), tensor in found.items() if kind == _MODEL},
        optimizer={name: tensor for (kind, name), tensor in found.items() if kind == _OPTIMIZER},
        random=_load_tensors(path, _RANDOM),
        state=load_state(path),
    )


def _load_tensors(path: Path, kind: str) -> dict[str, Tensor]:
    from polysketch.distributed.pieces import joined_pieces

    return joined_pieces((path / name, read_verified(path, name)) for name in files_in(path, kind))
