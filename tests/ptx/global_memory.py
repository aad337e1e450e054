"""The memory of a device: those tensors that a launch is given, and nothing else."""

import ctypes
from collections.abc import Iterator

import numpy as np
import torch

from ptx.formats import Array
from ptx.parsing import Fault


class GlobalMemory:
    """Storages of tensors on the CPU at the addresses where they lie; every other address is illegal."""

    def __init__(self) -> None:
        self._storages: dict[int, Array] = {}
        self._starts = np.zeros(0, np.uint64)

    def add(self, tensor: torch.Tensor) -> None:
        """Let programs reach this tensor's storage; the tensor must outlive the launch."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            bytes_there = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
            self._storages[storage.data_ptr()] = np.ctypeslib.as_array(bytes_there)
            self._starts = np.array(sorted(self._storages), np.uint64)

    def load(self, addresses: Array, size: int) -> Array:
        """(n, size) bytes."""
        found = np.empty((len(addresses), size), np.uint8)
        for chosen, rows, places in self._places(addresses, size, "load"):
            found[chosen] = rows[places]
        return found

    def store(self, addresses: Array, values: Array) -> None:
        """(n, size) bytes to n addresses."""
        for chosen, rows, places in self._places(addresses, values.shape[1], "store"):
            rows[places] = values[chosen]

    def _places(self, addresses: Array, size: int, what: str) -> Iterator[tuple[Array, Array, Array]]:
        """For every storage: which of the addresses lie there, the storage's bytes, and (n, size) offsets into it."""
        if (addresses % np.uint64(size)).any():
            raise Fault(f"misaligned {what} of {size} bytes at {hex(int(addresses[addresses % size != 0][0]))}")
        number = np.searchsorted(self._starts, addresses, side="right") - 1
        for one in np.unique(number):
            chosen = number == one
            if one < 0:
                raise Fault(f"illegal {what} at {hex(int(addresses[chosen][0]))}, before every tensor")
            start = self._starts[one]
            rows = self._storages[int(start)]
            offsets = (addresses[chosen] - start).astype(np.int64)
            if (offsets + size > len(rows)).any():
                raise Fault(f"illegal {what}: {size} bytes at offset {offsets.max()} of a tensor of {len(rows)}")
            yield chosen, rows, offsets[:, None] + np.arange(size)
