"""Token files without an index: nanoGPT's, which are ids and nothing else, and llm.c's, which begin with a header."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polysketch.data.tokens import TokenFile, require_size

HEADER_BYTES = 1024  # 256 of int32: magic, version, number of tokens, zeros
HEADERS: dict[tuple[int, int], np.dtype] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
"""Magic and version of llm.c: the type of the ids; GPT-2's and Llama 3's."""
QUESTIONS = 20240522
"""The magic of llm.c's files of multiple-choice questions."""

OTHERS = {
    b"\x93NUMPY": "an array of NumPy",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a file compressed by gzip",
    b"\x28\xb5\x2f\xfd": "a file compressed by zstd",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF": "an HDF5 file",
    b"MMIDIDX": "an index of Megatron-LM",
    b"TNTIDX": "an index of fairseq",
}
_LOOKED_AT = 2**16  # ids at the beginning of a file


def read_bare(paths: Sequence[Path]) -> tuple[str, list[TokenFile]]:
    """Files that lie together, all of nanoGPT or all of llm.c.

    Returns:
        Who made them, and the files in the order given.

    Raises:
        ValueError: A file is of neither, is cut short, or is of the other.
    """
    files = [_read(path) for path in paths]
    makers = {"llm.c" if file.offset else "nanoGPT" for file in files}
    if len(makers) > 1:
        bare = next(file.path for file in files if not file.offset)
        raise ValueError(f"expected files of one layout, found those of llm.c and without a header {bare}")
    return makers.pop(), files


def _read(path: Path) -> TokenFile:
    with path.open("rb") as file:
        beginning = file.read(HEADER_BYTES)
    for mark, name in OTHERS.items():
        if beginning.startswith(mark):
            raise ValueError(f"expected token ids of nanoGPT or llm.c in {path}, found {name}")
    if len(beginning) < HEADER_BYTES:
        return _read_ids(path)
    magic, version, tokens = (int(value) for value in np.frombuffer(beginning, dtype="<i4", count=3))
    if magic == QUESTIONS:
        raise ValueError(f"expected tokens of text in {path}, found llm.c's multiple-choice questions")
    if magic not in {known for known, _ in HEADERS}:
        return _read_ids(path)
    if (magic, version) not in HEADERS:
        expected = ", ".join(f"{number} of {known}" for known, number in HEADERS)
        raise ValueError(f"expected llm.c's version {expected} in {path}, found version {version} of {magic}")
    dtype = HEADERS[magic, version]
    if tokens < 1:
        raise ValueError(f"expected a positive number of tokens in the header of {path}, found {tokens}")
    require_size(path, HEADER_BYTES + tokens * dtype.itemsize)
    return TokenFile(path, dtype, tokens, HEADER_BYTES)


def _read_ids(path: Path) -> TokenFile:
    size = path.stat().st_size
    dtype = np.dtype("<u2")
    if size == 0 or size % dtype.itemsize:
        raise ValueError(f"expected ids of two bytes each (nanoGPT's uint16) in {path}, found {size} bytes")
    file = TokenFile(path, dtype, size // dtype.itemsize)
    first = file.map()[:_LOOKED_AT]
    if len(first) > 2 and not first[1::2].any() and first[0::2].any():
        raise ValueError(
            f"expected ids of two bytes each (nanoGPT's uint16) in {path}, found every second one 0: these are "
            "probably ids of four or eight bytes"
        )
    return file
