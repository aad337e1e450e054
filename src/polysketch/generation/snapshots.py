"""States after the beginnings of prompts, kept for the next prompt that begins so: a text is read once."""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from polysketch.models import ModelState

__all__ = ["Snapshots"]


class _Snapshot(NamedTuple):
    tokens: array
    state: ModelState

    @property
    def nbytes(self) -> int:
        """Bytes of both: of a long text the tokens may take more than a state of constant size."""
        return self.state.nbytes + len(self.tokens) * self.tokens.itemsize


class Snapshots:
    """States of one row by the tokens that they have read; the least recently used ones make room for new ones.

    Found by a hash (SHA-256) of all tokens, not by a part of them: a state answers for every token before it.

    Args:
        max_bytes: of all states together, and the tokens that they have read; 0 keeps none.

    Attributes:
        max_bytes: as given.
        nbytes: bytes of what is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._kept: OrderedDict[bytes, _Snapshot] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        """States that are kept."""
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[list[int], ModelState]]:
        """Tokens and state of each, the least recently used one first."""
        return ((list(each.tokens), each.state) for each in self._kept.values())

    def keep(self, tokens: Sequence[int], state: ModelState) -> None:
        """Keep the state after these tokens; what alone is larger than `max_bytes` is not kept.

        Args:
            tokens: all that were read, at least one.
            state: of one row, the caller's no longer.
        """
        if state.nbytes > self.max_bytes:
            return
        ids = array("q", tokens)
        snapshot = _Snapshot(ids, state)
        if snapshot.nbytes > self.max_bytes:
            return
        (digest,) = _digests(ids, [len(ids)])
        self._drop(digest)
        self._kept[digest] = snapshot
        self._lengths[len(ids)] += 1
        self.nbytes += snapshot.nbytes
        while self.nbytes > self.max_bytes:
            self._drop(next(iter(self._kept)))

    def longest(self, tokens: Sequence[int]) -> tuple[int, ModelState] | None:
        """The state after the longest beginning of `tokens` that is kept, all of them included.

        Returns:
            How many tokens, and a copy of the state after them; None where no beginning is kept.
        """
        lengths = sorted(length for length in self._lengths if length <= len(tokens))
        found = None
        for length, digest in zip(lengths, _digests(array("q", tokens), lengths), strict=True):
            found = (length, digest) if digest in self._kept else found
        if found is None:
            return None
        length, digest = found
        self._kept.move_to_end(digest)
        return length, self._kept[digest].state.clone()

    def _drop(self, digest: bytes) -> None:
        snapshot = self._kept.pop(digest, None)
        if snapshot is None:
            return
        self.nbytes -= snapshot.nbytes
        self._lengths[len(snapshot.tokens)] -= 1
        self._lengths += Counter()  # without those that are zero


def _digests(tokens: array, lengths: Sequence[int]) -> Iterator[bytes]:
    """The hash of the first tokens, for rising lengths, in one pass."""
    digest, before = hashlib.sha256(), 0
    for length in lengths:
        digest.update(tokens[before:length].tobytes())
        before = length
        yield digest.digest()
