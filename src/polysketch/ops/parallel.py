"""Independent pieces of work on the cores of a CPU: one thread for each, instead of every operation on all of them.

The loops of this library are long rows of small operations. Splitting each operation over the cores makes all cores
wait for one another thousands of times, and a machine that is busy with something else comes to a halt over it. Here
every thread works through pieces of its own; PyTorch releases the interpreter lock while it computes.
"""

import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

_lock = threading.Lock()
_pools: dict[int, "_Pool"] = {}
_inside = threading.local()


def num_workers(device: torch.device) -> int:
    """Threads that `run_in_parallel` would use: PyTorch's own number on a CPU; 1 on other devices and in a worker."""
    if device.type != "cpu" or getattr(_inside, "worker", False):
        return 1
    return torch.get_num_threads()


def run_in_parallel(work: Callable[[Sequence[T]], None], shares: Sequence[Sequence[T]]) -> None:
    """Call `work` on each share, each in a thread of its own, and wait for all.

    What a share computes does not depend on the others, so the result is the same in any order. Work runs without
    gradient, each thread with a single thread of PyTorch's.

    No thread works any more when this returns or raises, on Ctrl-C and after an error in one share too: threads write
    through raw addresses, which may belong to other tensors soon. Shares that are not begun are dropped then; those
    that are begun are waited for.

    Args:
        work: called with one share; its tensors must have been made before, or be its own. It refers to all of them,
            so that they live as long as it does.
        shares: items of each thread; with one share, or in a worker, everything runs in the calling thread.

    Raises:
        Whatever `work` raises, the first share's first; an interrupt before that.
    """
    if len(shares) == 1 or getattr(_inside, "worker", False):
        with torch.no_grad():
            for share in shares:
                work(share)
        return
    inference = torch.is_inference_mode_enabled()

    def job(share: Sequence[T]) -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            work(share)

    _SharedWork(job, shares).run(_queue(len(shares)))


def deal(items: Sequence[T], hands: int) -> list[Sequence[T]]:
    """Split into at most `hands` runs of nearly equal length, none of them empty."""
    hands = max(1, min(hands, len(items)))
    edges = [len(items) * hand // hands for hand in range(hands + 1)]
    return [items[start:stop] for start, stop in pairwise(edges)]


class _SharedWork(Generic[T]):
    """The shares of one call, which workers take one by one, and the count of those at work.

    An interrupt can hit the calling thread between any two of its steps. So nothing is known from what that thread did,
    only from what workers wrote down under the guard. Locks are plain ones, whose `with` cannot be interrupted halfway:
    a `Condition`, and with it an executor of `concurrent.futures`, can be left locked, and its threads hang for ever.
    """

    def __init__(self, job: Callable[[Sequence[T]], None], shares: Sequence[Sequence[T]]) -> None:
        self._job, self._shares = job, shares
        self._guard, self._over = threading.Lock(), threading.Lock()
        self._over.acquire()
        self._waiting = list(reversed(range(len(shares))))
        self._at_work = 0
        self._errors: dict[int, BaseException] = {}

    def run(self, queue: SimpleQueue) -> None:
        """Offer every share to the workers and wait until none is at work."""
        interrupt: BaseException | None = None
        try:
            for _ in self._shares:
                queue.put(self.take_one)
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupt = error
            self._drop_waiting()
        while True:
            try:
                while not self._is_over():
                    self._over.acquire()
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
                self._drop_waiting()
        # An error refers to the frames that it passed, and they to tensors: nothing here may refer to it afterwards.
        errors, self._errors = self._errors, {}
        try:
            if interrupt is not None:
                raise interrupt
            if errors:
                raise errors[min(errors)]
        finally:
            del interrupt, errors

    def take_one(self) -> None:
        """What a worker does with an offer: one share, or nothing where none waits. Never raises."""
        with self._guard:
            if not self._waiting:
                return
            index = self._waiting.pop()
            self._at_work += 1
        try:
            self._job(self._shares[index])
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            self._errors[index] = error
        finally:
            with self._guard:
                self._at_work -= 1
                if not self._at_work and not self._waiting:
                    self._over.release()

    def _drop_waiting(self) -> None:
        with self._guard:
            self._waiting.clear()

    def _is_over(self) -> bool:
        with self._guard:
            return not self._at_work and not self._waiting


class _Pool:
    """The threads of a process, as many as its widest call has had shares, and the queue of offers to them."""

    def __init__(self) -> None:
        self.queue: SimpleQueue = SimpleQueue()
        self.workers = 0

    def grow(self, workers: int) -> None:
        """Start what is missing of so many threads; they live as long as the process."""
        before = torch.get_num_threads()
        ready: SimpleQueue = SimpleQueue()
        started = 0

        def serve() -> None:
            _inside.worker = True
            torch.set_num_threads(1)
            ready.put(None)
            while True:
                self.queue.get()()  # without a name: a worker that waits keeps no tensor of its last call alive

        try:
            while self.workers < workers:
                threading.Thread(target=serve, name=f"polysketch-worker-{self.workers}", daemon=True).start()
                self.workers += 1
                started += 1
            for _ in range(started):
                ready.get()
        finally:
            # Threads that start later take the number set last, and that was the workers' 1.
            torch.set_num_threads(before)


def _queue(workers: int) -> SimpleQueue:
    """The queue of at least so many workers of this process: threads do not survive a fork."""
    process = os.getpid()
    with _lock:
        pool = _pools.setdefault(process, _Pool())
        if pool.workers < workers:
            pool.grow(workers)
        return pool.queue
