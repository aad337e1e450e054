"""Independent pieces of work on the cores of a CPU: one thread for each, instead of every operation on all of them.

The loops of this library are long rows of small operations. Splitting each operation over the cores makes all cores
wait for one another thousands of times, and a machine that is busy with something else comes to a halt over it. Here
every thread works through pieces of its own; PyTorch releases the interpreter lock while it computes.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import torch

T = TypeVar("T")

_lock = threading.Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
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

    Args:
        work: called with one share; its tensors must have been made before, or be its own.
        shares: items of each thread; with one share, or in a worker, everything runs in the calling thread.

    Raises:
        Whatever `work` raises, the first share's first.
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

    for result in [_pool(len(shares)).submit(job, share) for share in shares]:
        result.result()


def deal(items: Sequence[T], hands: int) -> list[Sequence[T]]:
    """Split into at most `hands` runs of nearly equal length, none of them empty."""
    hands = max(1, min(hands, len(items)))
    edges = [len(items) * hand // hands for hand in range(hands + 1)]
    return [items[start:stop] for start, stop in pairwise(edges)]


def _pool(workers: int) -> ThreadPoolExecutor:
    """A pool of this process: threads do not survive a fork."""
    key = (os.getpid(), workers)
    with _lock:
        if key not in _pools:
            _pools[key] = _start(workers)
        return _pools[key]


def _start(workers: int) -> ThreadPoolExecutor:
    before = torch.get_num_threads()
    started = threading.Barrier(workers)

    def initialize() -> None:
        _inside.worker = True
        torch.set_num_threads(1)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="polysketch", initializer=initialize)
    for result in [pool.submit(started.wait) for _ in range(workers)]:
        result.result()
    # Threads that start later take the number set last, and that was the workers' 1.
    torch.set_num_threads(before)
    return pool
