"""Who encodes: this process, other processes of this machine, or a cluster of Ray; always in the order of the text."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import TypeAlias

from polysketch.data.corpus import Document
from polysketch.data.encoding import Batch, Encoded, Encoder, PackedTokenizer
from polysketch.data.tokenization import TokenizerLike

# Batches that are being encoded or wait for it, for each worker: one in work, one ready.
BATCHES_AHEAD = 2
# How often a batch is given to new processes after those that encoded it ended.
MOST_ATTEMPTS = 3

EncodeInOrder: TypeAlias = Callable[[Iterator[Batch]], Iterator[tuple[Batch, Encoded]]]
"""Batches into the same batches with their tokens, in the same order."""


@contextlib.contextmanager
def encoding_workers(tokenizer: TokenizerLike, workers: int | None) -> Iterator[EncodeInOrder]:
    """What encodes batches while the block lasts.

    One worker is this process, where the `tokenizers` library uses all cores. More are processes of their own with one
    core each, which end with the block and with this process, however it ends. Each has at most two batches of 4 MB at
    a time. One that ends is replaced and what it had in hand is encoded again.

    Args:
        tokenizer: The tokenizer; for more than one worker of ``TOKENIZERS``.
        workers: At least 1; None for 1.

    Raises:
        ValueError: A tokenizer of another class for more than one.
        RuntimeError: The workers end again and again; raised while batches are encoded.
    """
    if workers is None or workers == 1:
        encoder = Encoder(tokenizer)
        yield lambda batches: ((batch, encoder(batch.documents)) for batch in batches)
        return
    pool = _Processes(PackedTokenizer.of(tokenizer), workers)
    try:
        yield pool.encode_in_order
    finally:
        pool.end()


class _Processes:
    """A pool of processes that survives the death of its workers."""

    def __init__(self, tokenizer: PackedTokenizer, workers: int) -> None:
        self._tokenizer = tokenizer
        self._workers = workers
        self._pool = self._new_pool()
        self._pending: deque[tuple[Batch, Future[Encoded]]] = deque()

    def encode_in_order(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Encoded]]:
        """Batches with their tokens, in their order; as many as there is room for are read ahead."""
        for batch in batches:
            self._submit(batch)
            if len(self._pending) >= self._workers * BATCHES_AHEAD:
                yield self._first()
        while self._pending:
            yield self._first()

    def end(self) -> None:
        """End the processes; what they have in hand is lost."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, batch: Batch) -> None:
        try:
            self._pending.append((batch, self._pool.submit(_encode, batch.documents)))
        except BrokenProcessPool:
            self._replace_pool()
            self._submit(batch)

    def _first(self) -> tuple[Batch, Encoded]:
        for _ in range(MOST_ATTEMPTS):
            batch, future = self._pending[0]
            try:
                encoded = future.result()
            except BrokenProcessPool:
                self._replace_pool()
            else:
                self._pending.popleft()
                return batch, encoded
        raise RuntimeError(
            f"expected the worker processes to stay, found them ended {MOST_ATTEMPTS} times at the text from "
            f"{self._pending[0][0].documents[0].origin} on: probably memory ran out; give fewer --workers"
        )

    def _replace_pool(self) -> None:
        """Give what is not encoded to new processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._new_pool()
        waiting, self._pending = self._pending, deque()
        for batch, future in waiting:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._pending.append((batch, future))
            else:
                self._pending.append((batch, self._pool.submit(_encode, batch.documents)))

    def _new_pool(self) -> ProcessPoolExecutor:
        # Not forked: the libraries have threads, which a fork would leave in the middle of what they do.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._workers, context, _begin, (self._tokenizer,))


_encoders: dict[str, Encoder] = {}
"""Of a worker process: its encoder by the fingerprint of the tokenizer."""


def _begin(tokenizer: PackedTokenizer) -> None:
    """Make a new process a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the first one ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoders[""] = single_threaded_encoder(tokenizer)


def single_threaded_encoder(tokenizer: PackedTokenizer) -> Encoder:
    """The encoder of a process that is one of many on its machine."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return Encoder(tokenizer.unpacked())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _encode(documents: list[Document]) -> Encoded:
    return _encoders[""](documents)
