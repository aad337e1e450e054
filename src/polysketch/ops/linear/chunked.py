"""Linear attention chunk by chunk in plain PyTorch: linear time, memory of a few chunks; CPU and CUDA.

PolySketchFormer, section 3.1: with Z_l the sums over the chunks before chunk l,

    numerator_l = E(Q_l) Z_l + W_l V_l        Z_{l+1} = Z_l + E(K_l)^T V_l

where W_l holds the weights inside the chunk: exact, or sketched. A sequence here is *aligned*: its first token opens a
chunk (`alignment.py` brings padding and states into this form). Heads go in small groups and queries in short rows, so
that a piece stays in cache. The backward pass keeps no state of the forward pass: one pass in order rebuilds the sums
and gives the gradient of what reads them (queries), one in reverse carries the gradient of the sums (keys, values).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.linear.state import state_dtype
from polysketch.ops.linear.sums import Sums
from polysketch.ops.linear.tiles import TILE, expanded_size
from polysketch.ops.linear.workspace import Workspace

# Query rows and heads of one piece on a CPU: about 1 MB of expanded features at sketch size 32, the size of a L2 cache.
ROWS_PER_PIECE = 128
HEADS_PER_GROUP = 4


class Diagonal(IntEnum):
    """Which weights inside a chunk count."""

    NONE = 0
    CAUSAL = 1
    FULL = 2


@dataclass(frozen=True)
class Plan:
    """Everything about a call that is not a tensor."""

    power: int
    causal: bool
    offset: float
    normalize: bool
    degree: int
    chunk: int
    diagonal: Diagonal
    return_sums: bool


class Inputs(NamedTuple):
    """Aligned tensors of one call; `length` (batch,) is each row's, None where all rows are full."""

    query: Tensor
    key: Tensor
    value: Tensor
    local_query: Tensor | None
    local_key: Tensor | None
    log_decay: Tensor | None
    sums: Tensor | None
    normalizer: Tensor | None
    length: Tensor | None


class Outputs(NamedTuple):
    """output (batch, heads, L, h), denominator (batch, heads, L), sums and normalizer of the folded tokens."""

    output: Tensor
    denominator: Tensor
    sums: Tensor
    normalizer: Tensor


def forward(inputs: Inputs, plan: Plan) -> Outputs:
    """The op on aligned inputs; see `polysketch.ops.linear_attention` for the formula."""
    query, value = inputs.query, inputs.value
    accumulate = state_dtype(value.dtype)
    batch, heads, length = query.shape[:3]
    key_heads, feature_dim = inputs.key.shape[1], inputs.key.shape[3]
    expanded = expanded_size(feature_dim, plan.power) if plan.return_sums else 0
    outputs = Outputs(
        value.new_empty(batch, heads, length, value.shape[3]),
        value.new_empty(batch, heads, length, dtype=accumulate),
        value.new_empty(batch, key_heads, expanded, value.shape[3], dtype=accumulate),
        value.new_empty(batch, key_heads, expanded, dtype=accumulate),
    )
    workspace = Workspace()
    for group in groups(inputs):
        _forward_group(_Piece(inputs, plan, group, workspace), outputs)
    return outputs


def backward(
    inputs: Inputs,
    plan: Plan,
    outputs: Outputs,
    output_gradient: Tensor,
    denominator_gradient: Tensor,
    sums_gradient: Tensor | None,
    normalizer_gradient: Tensor | None,
) -> dict[str, Tensor]:
    """Gradients by the names of `Inputs`, of those inputs that are present (`length` has none)."""
    accumulate = state_dtype(inputs.value.dtype)
    gradients = {
        name: torch.empty_like(tensor, dtype=accumulate, memory_format=torch.contiguous_format)
        for name, tensor in inputs._asdict().items()
        if tensor is not None and name != "length"
    }
    workspace = Workspace()
    for group in groups(inputs):
        piece = _Piece(inputs, plan, group, workspace)
        upstream = _Upstream(piece, outputs, output_gradient, denominator_gradient)
        end = None if sums_gradient is None else (sums_gradient, normalizer_gradient)
        _backward_queries(piece, upstream, gradients)
        _backward_keys(piece, upstream, gradients, end)
    if inputs.log_decay is not None:
        gradients["log_decay"] = _decay_gradient(inputs, plan, outputs, gradients, sums_gradient, normalizer_gradient)
    return {name: gradient.to(getattr(inputs, name).dtype) for name, gradient in gradients.items()}


class Group(NamedTuple):
    """A slice of the batch and a slice of the key heads, worked on together."""

    batch: slice
    heads: slice


def groups(inputs: Inputs) -> Iterator[Group]:
    """All of the batch and heads at once on a device with thousands of threads; few at a time on a CPU."""
    batch, key_heads = inputs.key.shape[:2]
    wide = inputs.query.device.type != "cpu"
    heads = key_heads if wide else min(key_heads, HEADS_PER_GROUP)
    rows = batch if wide else max(1, HEADS_PER_GROUP // heads)
    for row in range(0, batch, rows):
        for head in range(0, key_heads, heads):
            yield Group(slice(row, min(row + rows, batch)), slice(head, min(head + heads, key_heads)))


class _Piece:
    """One group of heads of one call: reads rows of its tensors as (G, rows, width), in the accumulating dtype.

    G counts (batch x key head) of the group; the query heads that share a key head lie one after another in `rows`.
    """

    def __init__(self, inputs: Inputs, plan: Plan, group: Group, workspace: Workspace):
        self.inputs, self.plan, self.group, self.workspace = inputs, plan, group, workspace
        self.dtype = state_dtype(inputs.value.dtype)
        self.shared = inputs.query.shape[1] // inputs.key.shape[1]
        self.pad = -inputs.key.shape[3] % TILE if plan.power == 2 else 0
        self.decay = None if inputs.log_decay is None else self.of_keys(inputs.log_decay[..., None])[..., 0]
        self.boundary = self._boundary()
        self._masks: dict[int, Tensor] = {}

    def _boundary(self) -> Tensor | None:
        """(G, 1): tokens that are folded, or None for all in every row."""
        inputs, chunk = self.inputs, self.plan.chunk if self.inputs.local_key is not None else 1
        if inputs.length is None:
            length = inputs.key.shape[2]
            if length % chunk == 0:
                return None
            return torch.full((self.size, 1), length - length % chunk, device=inputs.key.device)
        length = inputs.length[self.group.batch]
        heads = self.group.heads.stop - self.group.heads.start
        return (length - length % chunk).repeat_interleave(heads)[:, None]

    @property
    def size(self) -> int:
        """G."""
        batch, heads = self.group
        return (batch.stop - batch.start) * (heads.stop - heads.start)

    def of_keys(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor (batch, key_heads, L, width)."""
        view = x[self.group.batch, self.group.heads, start:stop]
        return view.reshape(-1, *view.shape[2:]).to(self.dtype)

    def of_queries(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Rows of a tensor (batch, heads, L, width), query heads of a key head one after another."""
        view = self._grouped(x)[:, :, :, start:stop]
        return view.reshape(self.size, self.shared * (stop - start), x.shape[3]).to(self.dtype)

    def write_keys(self, target: Tensor, start: int, stop: int, rows: Tensor) -> None:
        """The inverse of `of_keys`."""
        view = target[self.group.batch, self.group.heads, start:stop]
        view.copy_(rows[..., : view.shape[-1]].view(view.shape))

    def write_queries(self, target: Tensor, start: int, stop: int, rows: Tensor, *, add: bool = False) -> None:
        """The inverse of `of_queries`; `add` adds to what is there."""
        view = self._grouped(target)[:, :, :, start:stop]
        rows = rows[..., : view.shape[-1]].view(view.shape)
        if add:
            view.add_(rows)
        else:
            view.copy_(rows)

    def _grouped(self, x: Tensor) -> Tensor:
        """(batch, heads, ...) -> the group's (batch, key_heads, shared, ...)."""
        return x.unflatten(1, (-1, self.shared))[self.group.batch, self.group.heads]

    def padded(self, x: Tensor) -> Tensor:
        """Features padded to whole tiles at power 2."""
        return torch.nn.functional.pad(x, (0, self.pad)) if self.pad else x

    def query(self, start: int, stop: int) -> Tensor:
        """Query features (G, rows, r)."""
        return self.padded(self.of_queries(self.inputs.query, start, stop))

    def key(self, start: int, stop: int) -> Tensor:
        """Key features (G, tokens, r)."""
        return self.padded(self.of_keys(self.inputs.key, start, stop))

    def value(self, start: int, stop: int) -> Tensor:
        """Values (G, tokens, h)."""
        return self.of_keys(self.inputs.value, start, stop)

    def chunks(self) -> list[tuple[int, int]]:
        """(start, stop) of every chunk of keys."""
        length, chunk = self.inputs.key.shape[2], self.plan.chunk
        return [(start, min(start + chunk, length)) for start in range(0, length, chunk)]

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of short rows between `start` and `stop`."""
        rows = max(16, ROWS_PER_PIECE // self.shared)
        for first in range(start, stop, rows):
            yield first, min(first + rows, stop)

    def new_sums(self) -> Sums:
        """Empty sums for this group."""
        inputs = self.inputs
        like = inputs.value.new_empty(0, dtype=self.dtype)
        width = (inputs.key.shape[3], inputs.value.shape[3])
        return Sums.zeros(like, self.size, *width, self.plan.power, self.workspace)

    def initial_sums(self) -> tuple[Sums, bool]:
        """Sums before the first chunk, and whether they are empty."""
        sums = self.new_sums()
        if self.inputs.sums is None:
            return sums, True
        sums.load(self.of_keys(self.inputs.sums), self.of_keys(self.inputs.normalizer[..., None])[..., 0])
        return sums, False

    def decay_since(self, start: int, stop: int) -> Tensor | None:
        """(G, tokens): log decay from the start of a chunk to each of its tokens, that token's included."""
        return None if self.decay is None else self.decay[:, start:stop].cumsum(1)

    def read_factor(self, start: int, first: int, stop: int) -> Tensor | None:
        """(G, rows, 1): the decay from the boundary `start` to the queries `first`..`stop`."""
        since = self.decay_since(start, stop)
        return None if since is None else since[:, first - start :].exp().repeat(1, self.shared)[..., None]

    def fold_factors(self, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        """How a chunk is folded: factor of each token (G, tokens), factor of the sums before it (G,)."""
        if self.decay is None:
            return self._folded(start, stop), None
        valid = self._folded(start, stop)
        decay = self.decay[:, start:stop] if valid is None else self.decay[:, start:stop] * valid
        since = decay.cumsum(1)
        # Differences, never ratios of exponentials: at most zero, so nothing overflows.
        factor = (since[:, -1:] - since).clamp_(max=0).exp_()
        return factor if valid is None else factor * valid, since[:, -1].exp()

    def _folded(self, start: int, stop: int) -> Tensor | None:
        """(G, tokens): one where a token belongs to the folded ones, zero elsewhere; None where all do."""
        if self.boundary is None:
            return None
        return (torch.arange(start, stop, device=self.boundary.device) < self.boundary).to(self.dtype)

    def fold(self, sums: Sums, start: int, stop: int) -> None:
        """Fold the tokens of a chunk into the sums before it."""
        factor, carried = self.fold_factors(start, stop)
        if carried is not None:
            sums.decay(carried)
        for first, last in self.pieces(start, stop):
            part = None if factor is None else factor[:, first - start : last - start]
            sums.fold(self.key(first, last), self.value(first, last), part)

    def causal_mask(self, rows: int) -> Tensor:
        """(shared x rows, rows): one on and below the diagonal."""
        if rows not in self._masks:
            mask = torch.ones(rows, rows, dtype=self.dtype, device=self.inputs.value.device).tril_()
            self._masks[rows] = mask.repeat(self.shared, 1)
        return self._masks[rows]

    def mask_(self, weights: Tensor, rows: int) -> Tensor:
        """Zero what a query may not see: weights (G, shared x rows, keys), the last `rows` keys its own piece's."""
        if self.plan.diagonal == Diagonal.CAUSAL:
            weights[..., weights.shape[-1] - rows :].mul_(self.causal_mask(rows))
        return weights

    def last_key(self, chunk_stop: int, piece_stop: int) -> int:
        """Keys beyond this are masked for every query of a piece."""
        return piece_stop if self.plan.diagonal == Diagonal.CAUSAL else chunk_stop

    def diagonal_operands(self, start: int, first: int, last: int, end: int) -> tuple[Tensor, Tensor, int]:
        """Query rows, keys and exponent of the weights inside a chunk."""
        inputs = self.inputs
        if inputs.local_query is not None:
            query = self.of_queries(inputs.local_query, first, last)
            return query, self.of_keys(inputs.local_key, start, end), self.plan.degree
        return self.query(first, last), self.key(start, end), self.plan.power

    def decay_between(self, start: int, first: int, last: int, end: int) -> Tensor | None:
        """(G, rows, keys): decay from each key to each query inside a chunk; None where weights do not decay."""
        if self.decay is None or self.inputs.local_query is not None:
            return None
        since = self.decay_since(start, end)
        rows = since[:, first - start : last - start].repeat(1, self.shared)
        return (rows[..., None] - since[:, None, :]).clamp_(max=0).exp_()


class _Upstream:
    """Gradients of numerator and denominator, row by row, from those of the output."""

    def __init__(self, piece: _Piece, outputs: Outputs, output_gradient: Tensor, denominator_gradient: Tensor):
        self.piece, self.outputs = piece, outputs
        self.output_gradient, self.denominator_gradient = output_gradient, denominator_gradient

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Gradients of the numerator (G, R, h) and of the denominator (G, R)."""
        piece = self.piece
        gradient = piece.of_queries(self.output_gradient, start, stop)
        mass_gradient = piece.of_queries(self.denominator_gradient[..., None], start, stop)[..., 0]
        if not piece.plan.normalize:
            return gradient, mass_gradient
        mass = piece.of_queries(self.outputs.denominator[..., None], start, stop)
        numerator = gradient * _reciprocal(mass)
        output = piece.of_queries(self.outputs.output, start, stop)
        return numerator, mass_gradient - (numerator * output).sum(-1)


def _reciprocal(mass: Tensor) -> Tensor:
    """1 / mass, and zero for a row without any mass: its output is zero."""
    return torch.where(mass == 0, 0.0, 1.0 / mass)


def _power_(x: Tensor, exponent: int) -> Tensor:
    """x^exponent in place, by squarings: `pow` is many times slower on a CPU."""
    if exponent == 0:
        return x.fill_(1.0)
    odd = None
    while exponent > 1:
        if exponent % 2:
            odd = x.clone() if odd is None else odd.mul_(x)
        x.mul_(x)
        exponent //= 2
    return x if odd is None else x.mul_(odd)


def _forward_group(piece: _Piece, outputs: Outputs) -> None:
    sums, empty = piece.initial_sums()
    chunks = piece.chunks()
    if not piece.plan.causal:
        for start, stop in chunks:
            piece.fold(sums, start, stop)
        for first, last in piece.pieces(0, piece.inputs.query.shape[2]):
            _write_rows(piece, outputs, first, last, *sums.read(piece.query(first, last)))
        return
    for start, stop in chunks:
        for first, last in piece.pieces(start, stop):
            _write_rows(piece, outputs, first, last, *_chunk_rows(piece, sums, empty, (start, stop), (first, last)))
        if stop < chunks[-1][1] or piece.plan.return_sums:
            piece.fold(sums, start, stop)
            empty = False
    if piece.plan.return_sums:
        piece.write_keys(outputs.sums, 0, None, sums.packed_sums())
        piece.write_keys(outputs.normalizer[..., None], 0, None, sums.packed_normalizer()[..., None])


def _chunk_rows(piece: _Piece, sums: Sums, empty: bool, chunk: tuple[int, int], rows: tuple[int, int]):
    """Numerator (G, R, h) and denominator (G, R) of one piece of a chunk: from the sums, and from inside the chunk."""
    (start, stop), (first, last) = chunk, rows
    numerator = denominator = None
    if not empty:
        numerator, denominator = sums.read(piece.query(first, last))
        factor = piece.read_factor(start, first, last)
        if factor is not None:
            numerator, denominator = numerator.mul_(factor), denominator * factor[..., 0]
    if piece.plan.diagonal != Diagonal.NONE:
        end = piece.last_key(stop, last)
        weights = _weights(piece, start, first, last, end)
        value = piece.value(start, end)
        if numerator is None:
            return torch.bmm(weights, value), weights.sum(-1)
        return numerator.baddbmm_(weights, value), denominator.add_(weights.sum(-1))
    if numerator is None:
        size = (piece.size, piece.shared * (last - first))
        numerator = piece.inputs.value.new_zeros(*size, piece.inputs.value.shape[3], dtype=piece.dtype)
        return numerator, numerator.new_zeros(size)
    return numerator, denominator


def _weights(piece: _Piece, start: int, first: int, last: int, end: int) -> Tensor:
    """Weights inside a chunk (G, R, keys), masked and decayed."""
    query, key, exponent = piece.diagonal_operands(start, first, last, end)
    weights = piece.workspace.take("weights", (piece.size, query.shape[1], key.shape[1]), query)
    torch.bmm(query, key.mT, out=weights)
    _power_(weights, exponent)
    between = piece.decay_between(start, first, last, end)
    if between is not None:
        weights.mul_(between)
    return piece.mask_(weights, last - first)


def _write_rows(piece: _Piece, outputs: Outputs, start: int, stop: int, numerator: Tensor, denominator: Tensor) -> None:
    if piece.plan.normalize:
        denominator = denominator + piece.plan.offset
        numerator = numerator.mul_(_reciprocal(denominator)[..., None])
    piece.write_queries(outputs.output, start, stop, numerator)
    piece.write_queries(outputs.denominator[..., None], start, stop, denominator[..., None])


def _backward_queries(piece: _Piece, upstream: _Upstream, gradients: dict[str, Tensor]) -> None:
    """In order: rebuild the sums; what reads them gets its gradient."""
    sums, empty = piece.initial_sums()
    chunks = piece.chunks()
    if not piece.plan.causal:
        for start, stop in chunks:
            piece.fold(sums, start, stop)
        for first, last in piece.pieces(0, piece.inputs.query.shape[2]):
            gradient = sums.read_backward(piece.query(first, last), *upstream.rows(first, last))
            piece.write_queries(gradients["query"], first, last, gradient)
        return
    for start, stop in chunks:
        for first, last in piece.pieces(start, stop):
            if empty:
                piece._grouped(gradients["query"])[:, :, :, first:last].zero_()
                continue
            numerator, denominator = _decayed(piece, start, first, last, *upstream.rows(first, last))
            gradient = sums.read_backward(piece.query(first, last), numerator, denominator)
            piece.write_queries(gradients["query"], first, last, gradient)
        if stop < chunks[-1][1]:
            piece.fold(sums, start, stop)
            empty = False


def _decayed(piece: _Piece, start: int, first: int, last: int, numerator: Tensor, denominator: Tensor):
    """Gradients of what was read from the sums, given those of the whole numerator and denominator."""
    factor = piece.read_factor(start, first, last)
    return (numerator, denominator) if factor is None else (numerator * factor, denominator * factor[..., 0])


def _backward_keys(piece: _Piece, upstream: _Upstream, gradients: dict[str, Tensor], end) -> None:
    """In reverse: carry the gradient of the sums; keys and values get theirs, from the sums and inside the chunk."""
    carried = piece.new_sums()
    if end is not None:
        carried.load_gradient(piece.of_keys(end[0]), piece.of_keys(end[1][..., None])[..., 0])
    chunks = piece.chunks()
    if not piece.plan.causal:
        for first, last in piece.pieces(0, piece.inputs.query.shape[2]):
            carried.add_read_gradient(piece.query(first, last), *upstream.rows(first, last))
    for start, stop in reversed(chunks):
        _backward_chunk(piece, upstream, gradients, carried, start, stop)
    if piece.inputs.sums is not None:
        piece.write_keys(gradients["sums"], 0, None, carried.sums_gradient())
        piece.write_keys(gradients["normalizer"][..., None], 0, None, carried.normalizer_gradient()[..., None])


def _backward_chunk(piece: _Piece, upstream: _Upstream, gradients, carried: Sums, start: int, stop: int) -> None:
    factor, decay = piece.fold_factors(start, stop)
    rows = (piece.size, stop - start)
    inputs = piece.inputs
    key_gradient = inputs.key.new_empty(*rows, inputs.key.shape[3] + piece.pad, dtype=piece.dtype)
    value_gradient = inputs.value.new_empty(*rows, inputs.value.shape[3], dtype=piece.dtype)
    for first, last in piece.pieces(start, stop):
        here = slice(first - start, last - start)
        part = None if factor is None else factor[:, here]
        folded = carried.fold_backward(piece.key(first, last), piece.value(first, last), part)
        key_gradient[:, here], value_gradient[:, here] = folded
    if piece.plan.causal:
        _backward_diagonal(piece, upstream, gradients, key_gradient, value_gradient, start, stop)
        if decay is not None:
            carried.decay(decay)
        for first, last in piece.pieces(start, stop):
            numerator, denominator = _decayed(piece, start, first, last, *upstream.rows(first, last))
            carried.add_read_gradient(piece.query(first, last), numerator, denominator)
    piece.write_keys(gradients["key"], start, stop, key_gradient)
    piece.write_keys(gradients["value"], start, stop, value_gradient)


def _backward_diagonal(piece: _Piece, upstream, gradients, key_gradient, value_gradient, start: int, stop: int) -> None:
    """Gradients of the weights inside a chunk, added to those of its sketched keys and its values."""
    if piece.plan.diagonal == Diagonal.NONE:
        return
    inputs, local = piece.inputs, piece.inputs.local_query is not None
    inner = key_gradient.new_zeros(piece.size, stop - start, inputs.local_key.shape[3]) if local else key_gradient
    name = "local_query" if local else "query"
    for first, last in piece.pieces(start, stop):
        end = piece.last_key(stop, last)
        numerator, denominator = upstream.rows(first, last)
        query, key, exponent = piece.diagonal_operands(start, first, last, end)
        score = torch.bmm(query, key.mT)
        between = piece.decay_between(start, first, last, end)
        # d(s^p) = p s^(p-1) ds; the weight itself is s^(p-1) s.
        slope = _power_(score.clone(), exponent - 1)
        if between is not None:
            slope.mul_(between)
        piece.mask_(slope, last - first)
        weight = score.mul_(slope)
        value_gradient[:, : end - start].baddbmm_(weight.mT, numerator)
        change = torch.baddbmm(denominator[..., None], numerator, piece.value(start, end).mT)
        change.mul_(slope).mul_(exponent)
        piece.write_queries(gradients[name], first, last, torch.bmm(change, key), add=not local)
        inner[:, : end - start].baddbmm_(change.mT, query)
    if local:
        piece.write_keys(gradients["local_key"], start, stop, inner)


def _decay_gradient(inputs: Inputs, plan: Plan, outputs: Outputs, gradients, sums_gradient, normalizer_gradient):
    """(batch, key_heads, L), from gradients already known.

    With c the running total of log_decay, a sketched weight is homogeneous of degree `power` in its query and in its
    key and proportional to exp(c_i - c_j), so dc_t = (q_t . dq_t - k_t . dk_t) / power; what leaves through the final
    sums is proportional to exp(c) at their boundary.
    """
    accumulate = gradients["query"].dtype
    shared = inputs.query.shape[1] // inputs.key.shape[1]
    of_query = (inputs.query.to(accumulate) * gradients["query"]).sum(-1).unflatten(1, (-1, shared)).sum(2)
    of_key = (inputs.key.to(accumulate) * gradients["key"]).sum(-1)
    change = (of_query - of_key) / plan.power
    gradient = change.flip(-1).cumsum(-1).flip(-1)
    if sums_gradient is None:
        return gradient
    leaving = (sums_gradient * outputs.sums).sum((-1, -2)) + (normalizer_gradient * outputs.normalizer).sum(-1)
    chunk = plan.chunk if inputs.local_key is not None else 1
    positions = torch.arange(inputs.key.shape[2], device=gradient.device)
    length = inputs.length if inputs.length is not None else torch.tensor([len(positions)], device=gradient.device)
    folded = positions < (length - length % chunk)[:, None]
    return gradient + leaving[..., None] * folded[:, None]
