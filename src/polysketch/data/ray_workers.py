"""Encoding by the machines of a cluster of Ray: text goes to them and tokens come back, so they need no common disk."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from polysketch.data.corpus import Document
from polysketch.data.encoding import Batch, Encoded, Encoder, PackedTokenizer
from polysketch.data.tokenization import TokenizerLike
from polysketch.data.workers import BATCHES_AHEAD, MOST_ATTEMPTS, EncodeInOrder, single_threaded_encoder
from polysketch.extras import require


@contextlib.contextmanager
def ray_workers(tokenizer: TokenizerLike, workers: int | None) -> Iterator[EncodeInOrder]:
    """What encodes batches on a cluster while the block lasts.

    The cluster is the one that this process is connected to, else the one that ``RAY_ADDRESS`` names or that was
    started on this machine, else one of this machine alone, which ends with the block. Its machines need polysketch. A
    batch whose process or machine ends is encoded again by another.

    Args:
        tokenizer: Of ``TOKENIZERS``.
        workers: Batches encoded at a time, one core each; None for as many as the cluster has cores now.

    Raises:
        ImportError: The extra ``ray`` is missing.
        ValueError: A tokenizer of another class.
        RuntimeError: A batch's process ends again and again; raised while batches are encoded.
    """
    ray = require("ray")
    packed = PackedTokenizer.of(tokenizer)
    connected = ray.is_initialized()
    if not connected:
        ray.init(log_to_driver=False, logging_level="error")
    try:
        cores = int(ray.cluster_resources().get("CPU", 1)) if workers is None else workers
        yield _Cluster(ray, packed, cores).encode_in_order
    finally:
        if not connected:
            ray.shutdown()


class _Cluster:
    """Tasks of Ray in the order of the text."""

    def __init__(self, ray: Any, tokenizer: PackedTokenizer, workers: int) -> None:
        self._ray = ray
        self._tokenizer = ray.put(tokenizer)
        self._sha256 = tokenizer.sha256
        self._workers = workers
        self._task = ray.remote(num_cpus=1, max_retries=MOST_ATTEMPTS - 1)(encode_remotely)
        self._pending: deque[tuple[Batch, Any]] = deque()

    def encode_in_order(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Encoded]]:
        """Batches with their tokens, in their order; as many as there is room for are read ahead."""
        for batch in batches:
            reference = self._task.remote(self._sha256, [self._tokenizer], batch.documents)
            self._pending.append((batch, reference))
            if len(self._pending) >= self._workers * BATCHES_AHEAD:
                yield self._first()
        while self._pending:
            yield self._first()

    def _first(self) -> tuple[Batch, Encoded]:
        batch, reference = self._pending.popleft()
        try:
            return batch, self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise RuntimeError(
                f"expected the processes of Ray to stay, found them ended {MOST_ATTEMPTS} times at the text from "
                f"{batch.documents[0].origin} on ({type(error).__name__}): probably memory ran out"
            ) from error


_encoders: dict[str, Encoder] = {}
"""Of a process of Ray: encoders by the fingerprint of their tokenizer; the process serves many batches."""


def encode_remotely(sha256: str, tokenizer: Sequence[Any], documents: list[Document]) -> Encoded:
    """Encode documents in a process of Ray.

    Args:
        sha256: Fingerprint of the tokenizer.
        tokenizer: A reference to it, in a list so that it is fetched once for a process and not for each batch.
        documents: What to encode.
    """
    if sha256 not in _encoders:
        _encoders[sha256] = single_threaded_encoder(require("ray").get(tokenizer[0]))
    return _encoders[sha256](documents)
