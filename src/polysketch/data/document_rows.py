"""Training rows in which documents are packed side by side, in an order that needs no state."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from polysketch.data.best_fit import RowKind, best_fit_decreasing
from polysketch.data.documents import DocumentPieces
from polysketch.data.packed_batch import PackedBatch
from polysketch.data.permutation import KeyedPermutation, KeyedPermutations
from polysketch.data.tokens import Tokens
from polysketch.targets import NO_TARGET


class DocumentRows:
    """Documents packed into rows of ``context_length`` tokens, as a pure function of (seed, global row index).

    Each token of a document but its first is predicted once in an epoch, from the tokens of its piece before it. The
    first token of a document is never a target, for nothing of the document precedes it. An end of text is a target,
    and never in a row itself: nothing is predicted from it. A document longer than the context is cut into pieces
    (``DocumentPieces``); the last token of a piece predicts the first of the next piece, which sees nothing of the
    pieces before it.

    Best fit decreasing packs the pieces of the whole text. What it makes depends on the number of pieces of each length
    alone: so many rows of lengths (1500, 548), so many of (1500, 400, 148), and so on. Row ``index`` belongs to epoch
    ``index // num_rows``; in each epoch a keyed permutation gives the order of the rows, and another one for each
    length says which of the pieces of that length stands where. Nothing is stored and nothing is consumed: any process
    computes any batch alone, and resuming needs only the number of the step.

    Attributes:
        context_length: Number of tokens in a row.
        num_rows: Rows in an epoch.
        num_tokens: Tokens in an epoch that predict another one; the rest of the rows is padding.
        padding_share: Share of padding in an epoch.
    """

    def __init__(self, tokens: Tokens, context_length: int, seed: int, end_of_text: int) -> None:
        """Find the documents and pack them; keeps a reference to the tokens.

        Cost: two passes over the tokens, and memory as ``DocumentPieces``.

        Args:
            tokens: Ids, one-dimensional, of any integer type; usually ``Split.tokens``.
            context_length: At least 1.
            seed: Another seed gives another order.
            end_of_text: The id that ends a document.

        Raises:
            ValueError: No document has two tokens, or the context length is not positive.
        """
        if context_length < 1:
            raise ValueError(f"expected a context length of at least 1, found {context_length}")
        self.context_length = context_length
        self.seed = seed
        self._tokens = tokens
        self._padding_id = end_of_text
        self._pieces = DocumentPieces(tokens, end_of_text, context_length)
        self.num_tokens = self._pieces.num_tokens
        if not self.num_tokens:
            raise ValueError(
                f"expected a document of at least 2 tokens, found none in {len(tokens)} tokens with the end of text "
                f"{end_of_text}: nothing can be predicted"
            )
        self._kinds = _RowKinds(best_fit_decreasing(self._pieces.counts, context_length))
        self.num_rows = self._kinds.num_rows
        self.padding_share = 1 - self.num_tokens / (self.num_rows * context_length)
        self._epoch = _Epoch(-1, self.num_rows, self._pieces.counts, seed)

    def batch(self, step: int, batch_size: int) -> PackedBatch:
        """The rows that a step trains on.

        Args:
            step: Number of the step, from 0.
            batch_size: Rows in a batch, at least 1.

        Returns:
            The rows, tensors on the CPU.

        Raises:
            ValueError: The batch size is not positive, or the step negative.
        """
        if batch_size < 1 or step < 0:
            raise ValueError(
                f"expected a batch size of at least 1 and a step of at least 0, found {batch_size} and {step}"
            )
        epochs, positions = np.divmod(step * batch_size + np.arange(batch_size), self.num_rows)
        return self._filled(
            [row for epoch in np.unique(epochs) for row in self._rows(epoch, positions[epochs == epoch])]
        )

    def _rows(self, epoch: int, positions: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Starts and lengths of the pieces in each of some rows of an epoch."""
        if epoch != self._epoch.number:
            self._epoch = _Epoch(int(epoch), self.num_rows, self._pieces.counts, self.seed)
        rows = [self._kinds.pieces_of(row) for row in self._epoch.rows(positions).tolist()]
        lengths, ordinals = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        starts = self._pieces.starts(lengths, self._epoch.pieces(lengths, ordinals))
        ends = np.cumsum([len(lengths) for lengths, _ in rows])
        return list(zip(np.split(starts, ends[:-1]), np.split(lengths, ends[:-1]), strict=True))

    def _filled(self, rows: list[tuple[np.ndarray, np.ndarray]]) -> PackedBatch:
        """The tokens of rows of pieces, each row with padding to its end."""
        padding = [(-self.context_length, self.context_length - lengths.sum()) for _, lengths in rows]  # all below 0
        starts, spans = (
            np.concatenate([np.append(row[part], rest[part]) for row, rest in zip(rows, padding, strict=True)])
            for part in (0, 1)
        )
        ends = np.cumsum(spans)
        places = np.repeat(starts - (ends - spans), spans) + np.arange(ends[-1])
        return PackedBatch(
            ids=self._read(places, places >= 0, self._padding_id),
            targets=self._read(places + 1, places >= 0, NO_TARGET),
            cu_seqlens=torch.from_numpy(np.append(0, ends[spans > 0]).astype(np.int32)),
            context_length=self.context_length,
        )

    def _read(self, places: np.ndarray, real: np.ndarray, fill: int) -> torch.Tensor:
        """(1, places) int64: the tokens at the places, `fill` where they are not real."""
        ids = np.full(len(places), fill, dtype=np.int64)
        ids[real] = self._tokens[places[real]]
        return torch.from_numpy(ids)[None]


class _RowKinds:
    """Which pieces, by length and ordinal among those of their length, make which row of an epoch."""

    def __init__(self, kinds: list[RowKind]) -> None:
        self._kinds = kinds
        self._ends = np.cumsum([kind.rows for kind in kinds])
        self._used = _used_before(kinds)
        self.num_rows = int(self._ends[-1])

    def pieces_of(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Lengths and ordinals of the pieces in a row, (pieces,) int64 each, the longest first."""
        which = int(np.searchsorted(self._ends, row, side="right"))
        kind, used = self._kinds[which], self._used[which]
        number = row - (int(self._ends[which]) - kind.rows)
        lengths = np.repeat(*np.array(kind.pieces, dtype=np.int64).T)
        ordinals = [
            before + number * many + np.arange(many) for before, (_, many) in zip(used, kind.pieces, strict=True)
        ]
        return lengths, np.concatenate(ordinals)


def _used_before(kinds: list[RowKind]) -> list[list[int]]:
    """For each kind and each of its lengths, the number of pieces of that length in the kinds before it."""
    used: dict[int, int] = {}
    before = []
    for kind in kinds:
        before.append([used.get(length, 0) for length, _ in kind.pieces])
        used |= {length: used.get(length, 0) + kind.rows * many for length, many in kind.pieces}
    return before


class _Epoch:
    """The order of one epoch: permutations of the rows, and of the pieces of each length."""

    def __init__(self, number: int, num_rows: int, counts: np.ndarray, seed: int) -> None:
        self.number = number
        digest = hashlib.blake2b(f"documents/{seed}/{number}".encode(), digest_size=16).digest()
        self.rows = KeyedPermutation(num_rows, int.from_bytes(digest[:8], "little"))
        self.pieces = KeyedPermutations(counts, int.from_bytes(digest[8:], "little"))
