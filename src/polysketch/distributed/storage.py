"""Tensors of several processes in files of pieces: PyTorch's distributed checkpointing plans who writes and reads what.

The readers and writers of PyTorch keep the plan in a file that is unpickled. These keep it in the headers of the files.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from polysketch.distributed.pieces import PIECES, Piece, part_of, read_pieces, require_fitting
from polysketch.extras import require


class PieceWriter(dcp.StorageWriter):
    """Writes what the plan says is this process's: one file for each kind of tensor, empty where nothing is.

    Args:
        kinds: the first parts of the tensors' names.
        shares: what this process has of each tensor, by name, in host memory.
        rank: of this process.
        count: of processes.
        begin: called on the first process, before any writes.
        write: writes a file, given its name and content, so that it is on the disk; returns its entry of the manifest.
        commit: called on the first process, once all are written, with the entries of all files by name.
    """

    def __init__(
        self,
        kinds: Collection[str],
        shares: Mapping[str, Tensor],
        rank: int,
        count: int,
        *,
        begin: Callable[[], None],
        write: Callable[[str, bytes], Any],
        commit: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._kinds, self._shares = kinds, shares
        self._ending = f"-{rank + 1:05d}-of-{count:05d}.safetensors"
        self._begin, self._write, self._commit = begin, write, commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, kind after kind, so that one file is in memory at a time."""
        kinds: dict[str, list[Any]] = {kind: [] for kind in self._kinds}
        for item in plan.items:
            kinds[item.index.fqn.partition("/")[0]].append(item)
        written = []
        for kind, items in kinds.items():
            name = kind + self._ending
            data = self._serialised(items)
            written.append(WriteResult(MetadataIndex(name), len(data), (name, self._write(name, data))))
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all have written."""
        self._commit(dict(result.storage_data for part in results for result in part))

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from call to call."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are; the first process makes ready what all will write to."""
        self._begin()
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """No use is made of it."""
        return True

    def _serialised(self, items: list[Any]) -> bytes:
        tensors = {_name(item): self._shares[item.index.fqn] for item in items}
        cut = {
            _name(item): {"shape": [*item.tensor_data.size], "offsets": [*item.tensor_data.chunk.offsets]}
            for item in items
            if item.tensor_data.chunk.sizes != item.tensor_data.size
        }
        return require("safetensors.torch").save(tensors, metadata={PIECES: json.dumps(cut)} if cut else None)


def _name(item: Any) -> str:
    """The name of a tensor without its kind."""
    return item.index.fqn.partition("/")[2]


class PieceReader(dcp.StorageReader):
    """Reads what the plan says that this process needs, however many processes wrote it.

    Args:
        files: the files of each kind.
        read: gives the tensors of a file, whose content it has verified.
    """

    def __init__(self, files: Mapping[str, Collection[Path]], read: Callable[[Path], Mapping[str, Tensor]]) -> None:
        self._files, self._read = files, read
        self._places: dict[MetadataIndex, tuple[Path, str]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is there, from the headers of all files."""
        found: dict[str, Any] = {}
        for kind, paths in self._files.items():
            for path in paths:
                for name, piece in read_pieces(path).items():
                    self._add(found, f"{kind}/{name}", piece, (path, name))
        return Metadata(state_dict_metadata=found)

    def _add(self, found: dict[str, Any], key: str, piece: Piece, place: tuple[Path, str]) -> None:
        properties = TensorProperties(dtype=piece.dtype)
        tensor = found.setdefault(key, TensorStorageMetadata(properties, piece.shape, []))
        require_fitting(tensor.size == piece.shape, *place)
        tensor.chunks.append(ChunkStorageMetadata(piece.offsets, piece.sizes))
        self._places[MetadataIndex(key, piece.offsets)] = place

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file after file."""
        wanted: dict[Path, list[Any]] = {}
        for item in plan.items:
            wanted.setdefault(self._places[item.storage_index][0], []).append(item)
        for path, items in wanted.items():
            content = self._read(path)
            for item in items:
                source = content[self._places[item.storage_index][1]]
                target = planner.resolve_tensor(item)
                target.copy_(part_of(source, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from call to call."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """No use is made of it."""
        return True


def save_pieces(tensors: Mapping[str, Tensor], writer: PieceWriter, group: Any) -> None:
    """Write the tensors of all processes, each of which calls this. Which file has what does not depend on their order.

    Args:
        tensors: names `KIND/NAME` -> tensors, which say who has what of them; what is not a `DTensor` is the same on
            all processes.
        writer: of this process; it has the content.
        group: of the processes, for the collectives of the plan and of the end.

    Raises:
        Exception: what failed on one of them, the same on all, with the rank in it.
    """
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _plain_errors():
        # What copies have in common goes to the smallest file so far. The order is by name: so a resumed run, whose
        # optimizer has its fields in the order of files, writes the same files as one left alone.
        dcp.save(dict(sorted(tensors.items())), storage_writer=writer, planner=planner, process_group=group)


def load_pieces(tensors: Mapping[str, Tensor], reader: PieceReader) -> None:
    """Fill the tensors of all processes, each of which calls this; arguments and errors as for `save_pieces`."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _plain_errors():
        dcp.load(dict(tensors), storage_reader=reader, planner=planner)


class _plain_errors:
    """Raise, for a failure of several processes, that of the lowest rank, with its rank before the message."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, dcp.CheckpointException):
            return
        rank = min(error.failures)
        cause = error.failures[rank][0]
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"rank {rank}: {cause.strerror or cause}", cause.filename) from error
        raise type(cause)(f"rank {rank}: {cause}") from error
