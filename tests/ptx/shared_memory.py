"""Shared memory of several blocks: bytes, and who touched each of them since which barrier.

A fault is raised where a result would depend on the order of threads: at a byte that two threads touch, one of them
writing, without a barrier between; that a copy (`cp.async`) still writes or a product (`wgmma`) still reads; that a
product reads without a fence behind its write; and that nobody wrote.

Source: PTX ISA, "Memory Consistency Model", "Async Proxy" and "Asynchronous Data Copies".
"""

from typing import NamedTuple

import numpy as np

from ptx.formats import Array
from ptx.parsing import Fault

WARP = 32
UNIT = 16
"""Bytes that lie side by side in every layout of a product's operand."""
_NOBODY, _MANY = -1, -2
_LAST_BITS = 1e-5
"""Of a sum in float32."""
_ROUND = 1024
"""Blocks lie apart by a multiple of this: swizzles depend on addresses modulo less."""


class Accessor(NamedTuple):
    """Who touches bytes, for each address.

    Attributes:
        thread: number in its block; `_MANY` where a warp or more does it together.
        warp: number in its block; `_MANY` where several do.
    """

    thread: Array
    warp: Array


def single(threads: Array) -> Accessor:
    """Every address by a thread of its own."""
    return Accessor(threads, threads // WARP)


def together(warps: Array) -> Accessor:
    """Every address by a whole warp."""
    return Accessor(np.full_like(warps, _MANY), warps)


class _Record:
    """The last access of every byte: who, and the numbers of the barriers of the block and of the warp before it."""

    def __init__(self, size: int) -> None:
        self.thread = np.full(size, _NOBODY, np.int32)
        self.warp = np.full(size, _NOBODY, np.int32)
        self.barrier = np.full(size, -1, np.int32)
        self.warp_barrier = np.full(size, -1, np.int32)


def _nearly_equal(ones: Array, others: Array) -> bool:
    """Up to the last bits of the largest; integers, as the tiny numbers that they are then, never."""
    largest = np.abs(ones).max(initial=0.0)
    return np.allclose(ones, others, rtol=0.0, atol=_LAST_BITS * largest)


class _Copy(NamedTuple):
    """One that is not waited for.

    Attributes:
        group: number of its group.
        places, size: pieces that it writes, and bytes of each.
        by: who asked for it.
    """

    group: int
    places: Array
    size: int
    by: Accessor


class SharedMemory:
    """(blocks) memories of `size` bytes each; addresses come with the number of their block."""

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self._stride = -(-max(size, 1) // _ROUND) * _ROUND
        total = blocks * self._stride
        self._bytes = np.zeros(total, np.uint8)
        self._written, self._read = _Record(total), _Record(total)
        self._fenced = np.ones(total, bool)
        self._copied = np.zeros(total, np.int32)  # number of the copy that writes the byte; 0 for none
        self._multiplied = np.zeros(total, bool)  # whether a product reads the byte that is not waited for
        self._barrier = self._warp_barrier = 0
        self._copies = 0  # groups of copies that are committed
        self._pending_copies: list[_Copy] = []

    def taken(self, blocks: Array) -> "SharedMemory":
        """A copy with some blocks alone, by a truth value for each."""
        other = SharedMemory.__new__(SharedMemory)
        other.__dict__.update(self.__dict__)
        pick = lambda x: x.reshape(-1, self._stride)[blocks].reshape(-1)  # noqa: E731
        for name in ("_bytes", "_fenced", "_copied", "_multiplied"):
            setattr(other, name, pick(getattr(self, name)))
        for name in ("_written", "_read"):
            record = _Record(0)
            record.__dict__.update({key: pick(x) for key, x in vars(getattr(self, name)).items()})
            setattr(other, name, record)
        other._pending_copies = [self._moved(copy, blocks) for copy in self._pending_copies]
        return other

    def _moved(self, copy: _Copy, blocks: Array) -> _Copy:
        """Its pieces in some of the blocks, which are numbered anew."""
        numbers = np.where(blocks, np.cumsum(blocks) - 1, -1)
        block, inside = np.divmod(copy.places * copy.size, self._stride)
        kept = numbers[block] >= 0
        places = (numbers[block] * self._stride + inside)[kept] // copy.size
        return copy._replace(places=places, by=Accessor(copy.by.thread[kept], copy.by.warp[kept]))

    # What the instructions do.

    def load(self, addresses: Array, blocks: Array, size: int, by: Accessor) -> Array:
        """(n, size) bytes at n addresses."""
        places = self._places(addresses, blocks, size)
        self._check_written(places, size)
        self._check(self._written, places, size, by, "read of what another thread wrote")
        self._note_read(places, size, by)
        return self._bytes.reshape(-1, size)[places]

    def store(self, addresses: Array, blocks: Array, values: Array, by: Accessor) -> None:
        """(n, size) bytes to n addresses."""
        size = values.shape[1]
        places = self._places(addresses, blocks, size)
        self._check_write(places, size, by)
        self._bytes.reshape(-1, size)[places] = values
        self._check_agreement(places, values)
        self._note_write(places, size, by)
        self._fenced.reshape(-1, size)[places] = False

    def copy(self, addresses: Array, blocks: Array, values: Array, by: Accessor) -> None:
        """As `store`; but nobody may touch the bytes before the copy is waited for."""
        size = values.shape[1]
        places = self._places(addresses, blocks, size)
        self._check_write(places, size, by)
        self._bytes.reshape(-1, size)[places] = values
        self._check_agreement(places, values)
        self._copied.reshape(-1, size)[places] = self._copies + 1
        self._fenced.reshape(-1, size)[places] = True  # as `multiply` says
        self._pending_copies.append(_Copy(self._copies + 1, places, size, by))

    def commit_copies(self) -> None:
        """A group of copies ends."""
        self._copies += 1

    def wait_for_copies(self, left: int) -> None:
        """All groups but the last `left` are there, for the threads that copied; for others after a barrier."""
        done = self._copies - left
        for copy in (copy for copy in self._pending_copies if copy.group <= done):
            self._copied.reshape(-1, copy.size)[copy.places] = 0
            self._note_write(copy.places, copy.size, copy.by)
        self._pending_copies = [copy for copy in self._pending_copies if copy.group > done]

    def multiply(self, addresses: Array) -> Array:
        """(blocks, n, 16) bytes that a product reads at (blocks, n) addresses, and holds until `multiplied`.

        Copies need no fence here: Triton fences what registers are written from alone, by design. A strict reader of
        the ISA would ask for one behind every copy too.
        """
        places = self._places_of_product(addresses)
        self._check_written(places, UNIT)
        if not self._fenced.reshape(-1, UNIT)[places].all():
            raise Fault("a product reads what was written without fence.proxy.async behind it")
        if (self._written.barrier.reshape(-1, UNIT)[places] >= self._barrier).any():
            raise Fault("a product reads what was written without a barrier behind it")
        self._multiplied.reshape(-1, UNIT)[places] = True
        return self._bytes.reshape(-1, UNIT)[places].reshape(*addresses.shape, UNIT)

    def multiplied(self, addresses: Array) -> None:
        """A product is waited for: it read the bytes just now."""
        places = self._places_of_product(addresses)
        self._multiplied.reshape(-1, UNIT)[places] = False
        self._note_read(places, UNIT, together(np.full(len(places), _MANY, np.int32)))

    def hold(self, addresses: Array) -> None:
        """A product still reads the bytes, others of which may have been given back."""
        self._multiplied.reshape(-1, UNIT)[self._places_of_product(addresses)] = True

    def _places_of_product(self, addresses: Array) -> Array:
        blocks = np.broadcast_to(np.arange(len(addresses))[:, None], addresses.shape)
        return self._places(addresses.reshape(-1), blocks.reshape(-1), UNIT)

    def fence(self) -> None:
        """`fence.proxy.async`: products see what was written before it."""
        self._fenced[:] = True

    def barrier(self) -> None:
        """Of all threads of a block."""
        self._barrier += 1
        self._warp_barrier += 1

    def warp_barrier(self) -> None:
        """Of the threads of every warp."""
        self._warp_barrier += 1

    # What they may not do.

    def _places(self, addresses: Array, blocks: Array, size: int) -> Array:
        """Numbers of the pieces of `size` bytes."""
        outside = (addresses < 0) | (addresses + size > self.size)
        if outside.any():
            raise Fault(f"shared memory at {int(addresses[outside][0])} of {self.size} bytes, {size} at once")
        if (addresses % size).any():
            raise Fault(
                f"misaligned access of {size} bytes to shared memory at {int(addresses[addresses % size > 0][0])}"
            )
        return (blocks * self._stride + addresses) // size

    def _check_written(self, places: Array, size: int) -> None:
        if self._copied.reshape(-1, size)[places].any():
            raise Fault("read of what a copy still writes: no cp.async.wait_group before")
        never = (self._written.warp.reshape(-1, size)[places] == _NOBODY).any(1)
        if never.any():
            raise Fault(f"read of shared memory that nobody wrote, at {int(places[never][0]) * size % self._stride}")

    def _check_write(self, places: Array, size: int, by: Accessor) -> None:
        if self._copied.reshape(-1, size)[places].any():
            raise Fault("write to what a copy still writes")
        if self._multiplied.reshape(-1, size)[places].any():
            raise Fault("write to what a product still reads: no wgmma.wait_group before")
        self._check(self._written, places, size, by, "write over what another thread wrote")
        self._check(self._read, places, size, by, "write over what another thread reads")

    def _check_agreement(self, places: Array, values: Array) -> None:
        """Threads that write to one place at once write the same, but for the last bits of float32.

        Those may differ: where LLVM contracts a product and the sum over lanes behind it, each lane rounds the
        other's product and not its own. Whose number stays is then nobody's promise, and this keeps the last.
        """
        stays = self._bytes.reshape(-1, values.shape[1])[places]
        if (stays == values).all():
            return
        if values.shape[1] % 4 or not _nearly_equal(stays.view(np.float32), values.view(np.float32)):
            raise Fault("two threads write different values to one place")

    def _check(self, record: _Record, places: Array, size: int, by: Accessor, what: str) -> None:
        """No access in the record is by another thread, without a barrier since."""
        at = lambda x: x.reshape(-1, size)[places]  # noqa: E731
        recent = at(record.barrier) == self._barrier
        if not recent.any():
            return
        warp, thread = at(record.warp), at(record.thread)
        other_warp = (warp != by.warp[:, None]) | (warp == _MANY)
        other_thread = (thread != by.thread[:, None]) | (thread == _MANY)
        same_moment = at(record.warp_barrier) == self._warp_barrier
        wrong = recent & (other_warp | (other_thread & same_moment))
        if wrong.any():
            where = int(places[wrong.any(1)][0]) * size % self._stride
            raise Fault(f"race: {what}, without a barrier between, at {where} of shared memory")

    def _note_write(self, places: Array, size: int, by: Accessor) -> None:
        record = self._written
        record.thread.reshape(-1, size)[places] = by.thread[:, None]
        record.warp.reshape(-1, size)[places] = by.warp[:, None]
        record.barrier.reshape(-1, size)[places] = self._barrier
        record.warp_barrier.reshape(-1, size)[places] = self._warp_barrier
        self._note_several(record, places, size, by)

    def _note_read(self, places: Array, size: int, by: Accessor) -> None:
        """Readers are one thread, one warp, or many: of the instructions since the last barrier, and of this one."""
        record = self._read
        at = lambda x: x.reshape(-1, size)  # noqa: E731
        recent = at(record.barrier)[places] == self._barrier
        moment = recent & (at(record.warp_barrier)[places] == self._warp_barrier)
        other_warp = recent & (at(record.warp)[places] != by.warp[:, None])
        other_thread = moment & (at(record.thread)[places] != by.thread[:, None])
        at(record.warp)[places] = np.where(other_warp, _MANY, by.warp[:, None])
        at(record.thread)[places] = np.where(other_thread, _MANY, by.thread[:, None])
        at(record.barrier)[places] = self._barrier
        at(record.warp_barrier)[places] = self._warp_barrier
        self._note_several(record, places, size, by)

    def _note_several(self, record: _Record, places: Array, size: int, by: Accessor) -> None:
        """Places that one instruction touches by several threads: of these the record has the last."""
        for noted, own in ((record.thread, by.thread), (record.warp, by.warp)):
            several = noted.reshape(-1, size)[places, 0] != own
            noted.reshape(-1, size)[places[several]] = _MANY
