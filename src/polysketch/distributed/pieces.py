"""Tensors in safetensors files, each whole or in pieces that several processes wrote.

A file has tensors by name. A tensor that is only a piece has a line in the file's header, under `pieces`: the shape of
the whole, and where in it the piece begins.
"""

import struct
from collections.abc import Collection, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from polysketch.extras import require
from polysketch.storage.outside import decoded

PIECES = "pieces"
_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000  # as safetensors has it
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Piece:
    """Where a tensor of a file lies in the whole one.

    Attributes:
        shape: of the whole.
        offsets: of the piece's first element, along each axis.
        sizes: of the piece.
        dtype: of its elements.
    """

    def __init__(self, shape: Collection[int], offsets: Collection[int], sizes: Collection[int], dtype: str) -> None:
        self.shape, self.offsets, self.sizes = torch.Size(shape), torch.Size(offsets), torch.Size(sizes)
        self.dtype = _DTYPES[dtype]

    def of(self, tensor: Tensor) -> Tensor:
        """The part of the whole tensor that the piece is; they share memory."""
        return part_of(tensor, self.offsets, self.sizes)


def read_pieces(path: Path) -> dict[str, Piece]:
    """What a file holds, from its header alone.

    Raises:
        OSError: it cannot be read.
        ValueError: not a safetensors file, or one with another description of pieces.
    """
    with path.open("rb") as file:
        return _pieces(file, path)


def _pieces(file: BinaryIO, path: Path) -> dict[str, Piece]:
    try:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        entries = decoded(file.read(min(length, _LONGEST_HEADER)), path)
        cut = decoded(entries.pop("__metadata__", {}).get(PIECES, "{}"), path)
        return {
            name: Piece(
                cut.get(name, entry)["shape"],
                cut[name]["offsets"] if name in cut else [0] * len(entry["shape"]),
                entry["shape"],
                entry["dtype"],
            )
            for name, entry in entries.items()
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a safetensors file, found something else ({error})") from error


def joined_pieces(files: Iterable[tuple[Path, bytes]]) -> dict[str, Tensor]:
    """The whole tensors of files that are read already.

    Args:
        files: paths, for messages, and contents.

    Raises:
        ValueError: not safetensors files; pieces do not fit one another, or some are missing.
    """
    tensors: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    for path, data in files:
        content = parse_tensors(data, path)
        for name, piece in _pieces(BytesIO(data), path).items():
            if piece.sizes == piece.shape:
                tensors[name] = content[name]
            else:
                into = tensors.setdefault(name, torch.empty(piece.shape, dtype=piece.dtype))
                require_fitting(into.shape == piece.shape and into.dtype == piece.dtype, path, name)
                try:
                    piece.of(into).copy_(content[name])
                except (IndexError, RuntimeError):  # it begins or ends outside the whole
                    require_fitting(False, path, name)
            filled[name] = filled.get(name, 0) + piece.sizes.numel()
    for name, tensor in tensors.items():
        require_fitting(filled[name] == tensor.numel(), "the checkpoint", name)
    return tensors


def parse_tensors(data: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors in the content of a safetensors file, as they are there.

    Raises:
        ValueError: it is not one.
    """
    require("safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except SafetensorError as error:
        raise ValueError(
            f"{path}: expected a safetensors file, found something else ({error}): "
            "it was replaced together with its checksum, or written by another version"
        ) from error


def require_fitting(fits: bool, where: Any, name: str) -> None:
    if not fits:
        raise ValueError(f"{where}: expected pieces of {name!r} that make one tensor, found others or too few")


def part_of(tensor: Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """The part of a tensor that begins at `offsets`, along each axis, and has `sizes`; they share memory."""
    for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(axis, offset, size)
    return tensor
