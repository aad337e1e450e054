"""Megatron-LM's pairs of files: NAME.bin holds the ids, NAME.idx where sequences and documents begin (mmap, version 1).

The index, all little-endian: 9 bytes of magic, version (uint64), a code for the type of the ids (uint8), the number of
sequences (uint64), the number of entries that bound documents (uint64); then for each sequence its length (int32), for
each its first byte in the .bin (int64), and for each document, and for the end of the last, the number of its first
sequence (int64). Indices of several modalities end with a byte for each sequence.
"""

from __future__ import annotations

import bisect
from pathlib import Path

import numpy as np

from polysketch.data.tokens import TokenFile, require_size

MAGIC = b"MMIDIDX\x00\x00"
OLDER = b"TNTIDX\x00\x00"
VERSION = 1
FIXED_BYTES = 34
DTYPES = {code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))}
"""Code: type of the ids. 6 and 7 are floating-point numbers, which are no ids."""
_AT_A_TIME = 2**22  # sequences checked in one go


def read_megatron(prefix: Path) -> TokenFile:
    """The tokens of ``prefix``.bin, documents as ``prefix``.idx has them.

    Cost: the index is read once, at the speed of the disk; it is not kept in memory.

    Raises:
        ValueError: The index is of another format or version, or does not belong to the .bin.
    """
    index, tokens = prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")
    dtype, sequences, bounds = _header(index)
    ends = MegatronDocuments(index, dtype, sequences, bounds)
    total = ends.checked_tokens()
    if not total:
        raise ValueError(f"expected tokens in {tokens}, found none")
    require_size(tokens, total * dtype.itemsize)
    return TokenFile(tokens, dtype, total, ends=ends)


def _header(path: Path) -> tuple[np.dtype, int, int]:
    """Type of the ids, number of sequences, number of bounds of documents."""
    with path.open("rb") as file:
        beginning = file.read(FIXED_BYTES)
    if beginning.startswith(OLDER):
        raise ValueError(f"expected Megatron-LM's index for memory maps (MMIDIDX) in {path}, found fairseq's (TNTIDX)")
    if len(beginning) < FIXED_BYTES or not beginning.startswith(MAGIC):
        raise ValueError(f"expected Megatron-LM's index (beginning with MMIDIDX) in {path}, found {beginning[:8]!r}")
    version, code = int.from_bytes(beginning[9:17], "little"), beginning[17]
    sequences, bounds = (int.from_bytes(beginning[start : start + 8], "little") for start in (18, 26))
    if version != VERSION:
        raise ValueError(f"expected version {VERSION} of Megatron-LM's index in {path}, found {version}")
    if code not in DTYPES:
        known = ", ".join(f"{number} ({dtype.name})" for number, dtype in DTYPES.items())
        raise ValueError(f"expected ids of a type of {known} in {path}, found code {code}")
    size = FIXED_BYTES + 12 * sequences + 8 * bounds
    found = path.stat().st_size
    if found not in (size, size + sequences):
        raise ValueError(
            f"expected {size} bytes in {path} for {sequences} sequences and {bounds} bounds of documents, found "
            f"{found}: the file was cut short or altered"
        )
    return DTYPES[code], sequences, bounds


class MegatronDocuments:
    """Where the documents of a .bin end, from memory maps of its index."""

    def __init__(self, path: Path, dtype: np.dtype, sequences: int, bounds: int) -> None:
        self._path = path
        self._dtype = dtype
        self._lengths = _mapped(path, "<i4", FIXED_BYTES, sequences)
        self._pointers = _mapped(path, "<i8", FIXED_BYTES + 4 * sequences, sequences)
        self._bounds = _mapped(path, "<i8", FIXED_BYTES + 12 * sequences, bounds)

    def checked_tokens(self) -> int:
        """The number of tokens, after the whole index was checked.

        Raises:
            ValueError: Sequences do not lie one after the other, or documents are not made of whole sequences in order.
        """
        total = 0
        for start in range(0, len(self._lengths), _AT_A_TIME):
            lengths = self._lengths[start : start + _AT_A_TIME].astype(np.int64)
            after = total + np.cumsum(lengths)
            before = (after - lengths) * self._dtype.itemsize
            if lengths.min() < 0 or (self._pointers[start : start + _AT_A_TIME] != before).any():
                raise ValueError(
                    f"expected sequences that lie one after the other in {self._path}, found gaps or overlaps"
                )
            total = int(after[-1])
        bounds = self._bounds
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(self._lengths) or (np.diff(bounds) < 0).any():
            raise ValueError(f"expected documents from the first sequence to the last in {self._path}, found others")
        return total

    def count(self, start: int, stop: int) -> int:
        """Number of documents whose last token lies in [start, stop), empty ones after it included."""
        first, last = self._numbers(start, stop)
        return last - first

    def between(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) of the last tokens of documents, int64, ascending; empty documents have none."""
        first, last = self._numbers(start, stop)
        sequence = self._bounds[first + 1 : last + 1] - 1
        sequence = sequence[sequence >= 0]
        found = self._pointers[sequence] // self._dtype.itemsize + self._lengths[sequence] - 1
        return np.unique(found[found >= start])

    def _numbers(self, start: int, stop: int) -> tuple[int, int]:
        """The first document whose last token lies in [start, stop), and the first after that."""
        numbers = range(len(self._bounds) - 1)
        first = bisect.bisect_left(numbers, start, key=self._last)
        return first, bisect.bisect_left(numbers, stop, lo=first, key=self._last)

    def _last(self, number: int) -> int:
        """Position of the last token of a document; of an empty one, of the last token before it."""
        sequence = int(self._bounds[number + 1]) - 1
        if sequence < 0:
            return -1
        return int(self._pointers[sequence]) // self._dtype.itemsize + int(self._lengths[sequence]) - 1


def _mapped(path: Path, dtype: str, offset: int, count: int) -> np.ndarray:
    if not count:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))
