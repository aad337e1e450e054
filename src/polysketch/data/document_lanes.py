"""Training rows in which documents follow one another in lanes, cut where a row ends, in an order without a state."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from polysketch.data.documents import WholeDocuments
from polysketch.data.lane_batch import LaneBatch
from polysketch.data.permutation import KeyedPermutation
from polysketch.data.tokens import Tokens
from polysketch.targets import NO_TARGET


class DocumentLanes:
    """Documents one after the other in lanes, as a pure function of (seed, step, number of lanes).

    In each epoch a keyed permutation orders the documents, and that sequence is cut into lanes of one length. Step by
    step, each lane gives the next ``context_length`` tokens of its part. So a document that is longer than a row goes
    on in the next step, in the same lane, and whoever keeps the states that a row leaves can go on with it. A lane has
    no padding but at the end of its last row, whatever the lengths of documents are.

    Each token of a document but its first is predicted once in an epoch, from those of the document before it; but the
    last few of an epoch, fewer than there are lanes, are left out, others each time. The first token of a document is
    never a target, and an end of text only a target, as in `DocumentRows`. Where one lane ends and the next begins, a
    document may be cut: its second part is a document of its own there. That is at most one cut a lane and epoch.

    Nothing is stored and nothing is consumed: any process computes any batch alone, and resuming needs only the number
    of the step (and the states, which are the model's).

    Attributes:
        context_length: Number of tokens in a row.
        lanes: Number of lanes.
        num_steps: Steps in an epoch.
        num_tokens: Tokens in an epoch that predict another one; the rest of the rows is padding.
        padding_share: Share of padding in an epoch.
    """

    def __init__(self, tokens: Tokens, context_length: int, lanes: int, seed: int, end_of_text: int) -> None:
        """Find the documents; keeps a reference to the tokens.

        Cost: one pass over the tokens. Memory, or a temporary file for more than 16 million documents: 24 bytes a
        document.

        Args:
            tokens: Ids, one-dimensional, of any integer type; usually ``Split.tokens``.
            context_length: At least 1.
            lanes: At least 1: rows of a batch.
            seed: Another seed gives another order.
            end_of_text: The id that ends a document.

        Raises:
            ValueError: Fewer tokens can be predicted than there are lanes, or a size is not positive.
        """
        if context_length < 1 or lanes < 1:
            raise ValueError(
                f"expected a context length and a number of lanes of at least 1, found {context_length} and {lanes}"
            )
        self.context_length, self.lanes, self.seed = context_length, lanes, seed
        self._tokens, self._padding_id = tokens, end_of_text
        self._documents = WholeDocuments(tokens, end_of_text)
        self._of_lane = self._documents.num_tokens // lanes
        if not self._of_lane:
            raise ValueError(
                f"expected at least {lanes} tokens that predict another one of their document, one for each row of a "
                f"batch, found {self._documents.num_tokens} in {len(tokens)} tokens with the end of text {end_of_text}"
            )
        self.num_steps = -(-self._of_lane // context_length)
        self.num_tokens = self._of_lane * lanes
        self.padding_share = 1 - self._of_lane / (self.num_steps * context_length)
        self._epoch = _Epoch(0, self._documents, seed)

    def batch(self, step: int, batch_size: int) -> LaneBatch:
        """The rows that a step trains on, one of each lane.

        Args:
            step: Number of the step, from 0.
            batch_size: The number of lanes.

        Returns:
            The rows, tensors on the CPU.

        Raises:
            ValueError: Another batch size, or a negative step.
        """
        if batch_size != self.lanes or step < 0:
            raise ValueError(
                f"expected a batch of {self.lanes} rows, one of each lane, and a step of at least 0, found "
                f"{batch_size} and {step}"
            )
        epoch, number = divmod(step, self.num_steps)
        if epoch != self._epoch.number:
            self._epoch = _Epoch(epoch, self._documents, self.seed)
        return self._filled([self._row(lane * self._of_lane, number) for lane in range(self.lanes)])

    def _row(self, lane_start: int, number: int) -> _Row:
        """The row of that number in the lane that begins there in the epoch's sequence."""
        start = lane_start + number * self.context_length
        stop = min(start + self.context_length, lane_start + self._of_lane)
        places, ends, documents = self._epoch.between(start, stop)
        first = max(lane_start, int(documents[0]))
        return _Row(
            places=places,
            lengths=np.diff(np.minimum(ends, stop), prepend=start),
            position=start - first,
            goes_on=stop < lane_start + self._of_lane and bool(ends[-1] > stop),
        )

    def _filled(self, rows: list[_Row]) -> LaneBatch:
        """The tokens of the rows, each with padding to its end."""
        size = self.context_length
        ids = np.full((len(rows), size), self._padding_id, dtype=np.int64)
        targets = np.full((len(rows), size), NO_TARGET, dtype=np.int64)
        lengths = []
        for number, row in enumerate(rows):
            count = int(row.lengths.sum())
            places = np.repeat(row.places - (np.cumsum(row.lengths) - row.lengths), row.lengths) + np.arange(count)
            ids[number, :count], targets[number, :count] = self._tokens[places], self._tokens[places + 1]
            lengths += [*row.lengths.tolist(), *[size - count] * (count < size)]
        return LaneBatch(
            ids=torch.from_numpy(ids).reshape(1, -1),
            targets=torch.from_numpy(targets).reshape(1, -1),
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            context_length=size,
            first_lane=0,
            positions=tuple(row.position for row in rows),
            goes_on=tuple(row.goes_on for row in rows),
        )


@dataclass(frozen=True)
class _Row:
    """What stands in a row.

    Attributes:
        places: (documents,) positions in the file of the first token of each document, or of its part here.
        lengths: (documents,) tokens of each here.
        position: tokens of the first document in the rows before.
        goes_on: whether the last one goes on in the next row.
    """

    places: np.ndarray
    lengths: np.ndarray
    position: int
    goes_on: bool


class _Epoch:
    """The sequence of one epoch: the documents in its order, one after the other."""

    def __init__(self, number: int, documents: WholeDocuments, seed: int) -> None:
        self.number = number
        self._documents = documents
        digest = hashlib.blake2b(f"lanes/{seed}/{number}".encode(), digest_size=8).digest()
        self._order = KeyedPermutation(documents.count, int.from_bytes(digest, "little"))
        self._ends = documents.ends_in(self._order)

    def between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What stands in [start, stop) of the sequence.

        Returns:
            Of each document that has tokens there: the position in the file of the first of these, the end of the
            document in the sequence, and its start.
        """
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        ends = np.asarray(self._ends[first : last + 1])
        which = self._order(np.arange(first, last + 1))
        starts = ends - self._documents.lengths[which]
        return self._documents.starts[which] + np.maximum(start - starts, 0), ends, starts
