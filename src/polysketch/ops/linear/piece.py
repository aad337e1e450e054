"""One group of heads of one call: rows of its tensors, decays and masks, in the dtype that sums are kept in."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.linear.packing import TILE
from polysketch.ops.linear.state import adding_dtype, state_dtype
from polysketch.ops.linear.sums import Sums
from polysketch.ops.linear.types import Diagonal, Inputs, Plan, Stretch
from polysketch.ops.mass import is_none
from polysketch.ops.parallel import deal, num_workers
from polysketch.ops.workspace import Workspace

# Query rows, and at most so many heads, worked on together on a CPU: enough that an operation takes longer than its
# call, few enough that expanded features stay in cache.
ROWS_PER_PIECE = 128
HEADS_PER_GROUP = 6


class Group(NamedTuple):
    """A slice of the batch and a slice of the key heads, worked on together."""

    batch: slice
    heads: slice

    @property
    def size(self) -> int:
        """Batch rows times key heads."""
        return (self.batch.stop - self.batch.start) * (self.heads.stop - self.heads.start)


def shares(inputs: Inputs) -> list[Sequence[Group]]:
    """What each thread works on: everything at once on a GPU; on a CPU small groups, dealt out evenly."""
    batch, key_heads = inputs.key.shape[:2]
    if inputs.query.device.type != "cpu":
        return [[Group(slice(0, batch), slice(0, key_heads))]]
    workers, total = num_workers(inputs.query.device), batch * key_heads
    if total == 0:
        return [[]]
    # As few groups as the limit allows, as many for every thread; then heads, or whole rows, shared out evenly.
    size = _ceil_div(total, workers * _ceil_div(total, workers * HEADS_PER_GROUP))
    heads = _ceil_div(key_heads, _ceil_div(key_heads, size))
    rows = max(1, size // key_heads)
    found = [
        Group(slice(row, min(row + rows, batch)), slice(head, min(head + heads, key_heads)))
        for row in range(0, batch, rows)
        for head in range(0, key_heads, heads)
    ]
    return deal(found, workers)


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


class Piece:
    """Reads and writes rows of a group as (G, rows, width).

    G counts batch rows times key heads of the group; the query heads that share a key head lie one after another in
    `rows`.
    """

    def __init__(self, inputs: Inputs, plan: Plan, group: Group, workspace: Workspace):
        self.inputs, self.plan, self.group, self.workspace = inputs, plan, group, workspace
        self.size = group.size
        self.dtype = state_dtype(inputs.value.dtype)
        self.shared = inputs.query.shape[1] // inputs.key.shape[1]
        self.length = inputs.key.shape[2]
        self.local = inputs.local_query is not None
        self._views: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
        self.decay = None if inputs.log_decay is None else self.whole(inputs.log_decay)
        self._pad = -inputs.key.shape[3] % TILE if plan.power == 2 else 0
        self._boundary = self._find_boundary()
        self._masks: dict[int, Tensor] = {}

    # Rows in and out. Every call on a tensor, a mere view included, passes the interpreter lock from thread to thread:
    # views of the group are made once, and rows of them with as few calls as possible.

    def rows(self, tensor: Tensor, span: Stretch) -> Tensor:
        """Tokens of a tensor (batch, key_heads, L, ...), as (G, T, ...)."""
        view = self._view(tensor, queries=False).narrow(2, span.start, span.size)
        return self._widened(view.reshape(self.size, *view.shape[2:]))

    def query_rows(self, tensor: Tensor, span: Stretch) -> Tensor:
        """Tokens of a tensor (batch, heads, L, ...), as (G, R, ...), query heads of a key head one after another."""
        view = self._view(tensor, queries=True).narrow(3, span.start, span.size)
        return self._widened(view.reshape(self.size, self.shared * span.size, *view.shape[4:]))

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor (batch, key_heads, rows, ...), as (G, rows, ...)."""
        return self.rows(tensor, Stretch(0, tensor.shape[2]))

    def write(self, target: Tensor, span: Stretch, rows: Tensor) -> None:
        """The inverse of `rows`."""
        view = self._view(target, queries=False).narrow(2, span.start, span.size)
        view.copy_(self._cut(rows, target).view(view.shape))

    def write_queries(self, target: Tensor, span: Stretch, rows: Tensor, *, add: bool = False) -> None:
        """The inverse of `query_rows`; `add` adds to what is there."""
        view = self._view(target, queries=True).narrow(3, span.start, span.size)
        rows = self._cut(rows, target).view(view.shape)
        if add:
            view.add_(rows)
        else:
            view.copy_(rows)

    def write_sums(self, sums: Tensor, normalizer: Tensor, found: tuple[Tensor, Tensor]) -> None:
        """Write sums and normalizer in the public layout."""
        self.write(sums, Stretch(0, sums.shape[2]), found[0])
        self.write(normalizer, Stretch(0, normalizer.shape[2]), found[1])

    def _view(self, tensor: Tensor, *, queries: bool) -> Tensor:
        """The group's part of a tensor: (batch, key_heads, ...), or (batch, key_heads, shared, ...) of queries."""
        key = (id(tensor), queries)
        if key not in self._views:
            whole = tensor.unflatten(1, (-1, self.shared)) if queries else tensor
            # The tensor is kept too, or another could take its place in memory, and its id.
            self._views[key] = (whole[self.group.batch, self.group.heads], tensor)
        return self._views[key][0]

    def _widened(self, rows: Tensor) -> Tensor:
        return rows if rows.dtype == self.dtype else rows.to(self.dtype)

    def _cut(self, rows: Tensor, target: Tensor) -> Tensor:
        """Rows without the padding of features."""
        return rows if rows.dim() < 3 or rows.shape[-1] == target.shape[-1] else rows[..., : target.shape[-1]]

    # Operands.

    def query(self, span: Stretch) -> Tensor:
        """Query features (G, R, r), padded to whole tiles at power 2."""
        return self._padded(self.query_rows(self.inputs.query, span))

    def key(self, span: Stretch) -> Tensor:
        """Key features (G, T, r), padded like the query's."""
        return self._padded(self.rows(self.inputs.key, span))

    def value(self, span: Stretch) -> Tensor:
        """Values (G, T, h)."""
        return self.rows(self.inputs.value, span)

    def inner_operands(self, rows: Stretch, keys: Stretch) -> tuple[Tensor, Tensor, int, int]:
        """Query rows, keys, exponent and factors of the weights inside a chunk."""
        inputs = self.inputs
        if inputs.local_query is not None and inputs.local_key is not None:
            return self.query_rows(inputs.local_query, rows), self.rows(inputs.local_key, keys), self.plan.degree, 1
        return self.query(rows), self.key(keys), self.plan.power, self.plan.factors

    def _padded(self, features: Tensor) -> Tensor:
        return torch.nn.functional.pad(features, (0, self._pad)) if self._pad else features

    # Spans.

    def chunks(self) -> list[Stretch]:
        """Every chunk of keys."""
        size, length = self.plan.chunk, self.length
        return [Stretch(start, min(start + size, length)) for start in range(0, length, size)]

    def short(self, span: Stretch) -> Iterator[Stretch]:
        """Short rows that make up a span."""
        rows = max(16, ROWS_PER_PIECE // self.shared)
        for first in range(span.start, span.stop, rows):
            yield Stretch(first, min(first + rows, span.stop))

    def queries(self) -> Iterator[Stretch]:
        """Short rows that make up all queries."""
        return self.short(Stretch(0, self.inputs.query.shape[2]))

    def visible(self, chunk: Stretch, rows: Stretch) -> Stretch:
        """The keys of a chunk that some of these queries may see."""
        block = self.plan.diagonal
        if block == Diagonal.FULL:
            return chunk
        return Stretch(chunk.start, min(chunk.stop, chunk.start + -(-(rows.stop - chunk.start) // block) * block))

    def reciprocal(self, mass: Tensor) -> Tensor:
        """1 / mass, and zero for a row without weight: its output is zero."""
        if self.plan.offset > 0 and self.plan.power == 2:
            return mass.reciprocal()  # weights are not negative, so there is mass in every row
        return torch.where(is_none(mass), 0.0, 1.0 / mass)

    def mask_(self, weights: Tensor, rows: Stretch) -> Tensor:
        """Zero what a query may not see, in weights (G, R, keys) of the keys that are `visible`."""
        if self.plan.diagonal == Diagonal.CAUSAL:
            weights[..., weights.shape[-1] - rows.size :].mul_(self._causal_mask(rows.size))
        elif self.plan.diagonal != Diagonal.FULL:
            weights.mul_(self._block_mask(rows, weights.shape[-1]))
        return weights

    def _causal_mask(self, rows: int) -> Tensor:
        if rows not in self._masks:
            mask = torch.ones(rows, rows, dtype=self.dtype, device=self.inputs.value.device).tril_()
            self._masks[rows] = mask.repeat(self.shared, 1)
        return self._masks[rows]

    def _block_mask(self, rows: Stretch, keys: int) -> Tensor:
        """One where a key's block is not after the query's; keys count from the chunk's first token, as blocks do."""
        device, block = self.inputs.value.device, self.plan.diagonal
        of_rows = (torch.arange(*rows, device=device) % self.plan.chunk) // block
        of_keys = torch.arange(keys, device=device) // block
        return (of_rows[:, None] >= of_keys).to(self.dtype).repeat(self.shared, 1)

    # Sums and decay.

    def new_sums(self) -> Sums:
        """Empty sums for this group."""
        like = self.inputs.value.new_empty(0, dtype=self.dtype)
        widths = (self.inputs.key.shape[3], self.inputs.value.shape[3])
        return Sums(like, self.size, *widths, self.plan.power, self.plan.factors, self.workspace)

    def initial_sums(self) -> Sums:
        """Sums before the first chunk."""
        sums = self.new_sums()
        if self.inputs.sums is not None and self.inputs.normalizer is not None:
            sums.load(self.whole(self.inputs.sums), self.whole(self.inputs.normalizer))
        return sums

    def fold(self, sums: Sums, chunk: Stretch) -> None:
        """Fold the tokens of a chunk into the sums before it."""
        if self.nothing_folded(chunk):
            return
        factor, carried = self.fold_factors(chunk)
        if carried is not None:
            sums.decay(carried)
        for rows in self.short(chunk):
            part = None if factor is None else factor[:, rows.within(chunk)]
            sums.fold(self.key(rows), self.value(rows), part)

    def nothing_folded(self, chunk: Stretch) -> bool:
        """Whether the chunk stays open in every row."""
        return self.local and self.inputs.length is None and chunk.size < self.plan.chunk

    def fold_factors(self, chunk: Stretch) -> tuple[Tensor | None, Tensor | None]:
        """How a chunk is folded: factor of each token (G, T), factor of the sums before it (G,); None for 1."""
        folded = self._folded(chunk)
        if self.decay is None:
            return folded, None
        decay = self.decay[:, chunk.start : chunk.stop]
        since = (decay if folded is None else decay * folded).cumsum(1)
        # Differences, never ratios of exponentials: at most zero, so nothing overflows.
        factor = (since[:, -1:] - since).clamp_(max=0).exp_()
        carried = since[:, -1].to(adding_dtype(since)).exp()  # its rounding would add up, chunk after chunk
        return factor if folded is None else factor * folded, carried

    def read_factor(self, chunk: Stretch, rows: Stretch) -> Tensor | None:
        """(G, R): the decay from the start of a chunk to its queries; None for 1."""
        if self.decay is None:
            return None
        since = self.decay[:, chunk.start : rows.stop].cumsum(1)
        return since[:, rows.start - chunk.start :].exp_().repeat(1, self.shared)

    def decay_between(self, keys: Stretch, rows: Stretch) -> Tensor | None:
        """(G, R, keys): decay from each key to each query inside a chunk; None where weights do not decay."""
        if self.decay is None or self.local:
            return None
        since = self.decay[:, keys.start : max(keys.stop, rows.stop)].cumsum(1)
        of_rows = since[:, rows.within(keys)].repeat(1, self.shared)
        return (of_rows[..., None] - since[:, None, : keys.size]).clamp_(max=0).exp_()

    def _find_boundary(self) -> Tensor | None:
        """(G, 1): how many tokens of each row are folded at the end; None for all of every row."""
        chunk = self.plan.chunk if self.local else 1
        if self.inputs.length is not None:
            length = self.inputs.length[self.group.batch]
            heads = self.group.heads.stop - self.group.heads.start
            return (length - length % chunk).repeat_interleave(heads)[:, None]
        if self.length % chunk == 0:
            return None
        return torch.full((self.size, 1), self.length - self.length % chunk, device=self.inputs.key.device)

    def _folded(self, chunk: Stretch) -> Tensor | None:
        """(G, T): one where a token is folded, zero elsewhere; None where all are."""
        if self._boundary is None:
            return None
        return (torch.arange(*chunk, device=self._boundary.device) < self._boundary).to(self.dtype)
