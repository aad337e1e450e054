"""The gradient of the chunked backend, written out; nothing of the forward pass is kept but its output.

One pass in order rebuilds the sums and gives the gradient of what reads them (queries); one in reverse carries the
gradient of the sums (keys, values) and does the weights inside the chunks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.linear.chunked import power_
from polysketch.ops.linear.packing import halves
from polysketch.ops.linear.piece import Group, Piece, shares
from polysketch.ops.linear.state import state_dtype
from polysketch.ops.linear.sums import Sums
from polysketch.ops.linear.types import Diagonal, Inputs, Outputs, Plan, Stretch
from polysketch.ops.parallel import run_in_parallel
from polysketch.ops.workspace import Workspace


def backward(inputs: Inputs, plan: Plan, outputs: Outputs, upstream: Outputs) -> dict[str, Tensor]:
    """Gradients by the names of `Inputs`, in the dtype of sums; see `Backend`.

    Args:
        inputs, plan: of the forward call.
        outputs: what it gave.
        upstream: the gradients of its outputs.
    """
    dtype = state_dtype(inputs.value.dtype)
    given = inputs._replace(log_decay=None).differentiable()
    gradients = {name: tensor.new_empty(tensor.shape, dtype=dtype) for name, tensor in given.items()}

    def work(share: Sequence[Group]) -> None:
        workspace = Workspace()
        for group in share:
            task = _Task(Piece(inputs, plan, group, workspace), outputs, upstream, gradients)
            for run in (_queries_causal, _keys_causal) if plan.causal else (_all,):
                run(task)

    run_in_parallel(work, shares(inputs))
    return gradients


class _Task(NamedTuple):
    """One group of a call, and where its gradients come from and go to."""

    piece: Piece
    outputs: Outputs
    upstream: Outputs
    gradients: dict[str, Tensor]

    def rows(self, rows: Stretch) -> tuple[Tensor, Tensor]:
        """Gradients of the numerator (G, R, h) and of the denominator (G, R), from those of the output."""
        piece = self.piece
        numerator = piece.query_rows(self.upstream.output, rows)
        mass_gradient = piece.query_rows(self.upstream.denominator, rows)
        if not piece.plan.normalize:
            return numerator, mass_gradient
        mass = piece.query_rows(self.outputs.denominator, rows)
        numerator = numerator * piece.reciprocal(mass)[..., None]
        return numerator, mass_gradient - (numerator * piece.query_rows(self.outputs.output, rows)).sum(-1)

    def decayed_rows(self, chunk: Stretch, rows: Stretch) -> tuple[Tensor, Tensor]:
        """Gradients of what was read from the sums at the start of a chunk."""
        numerator, denominator = self.rows(rows)
        factor = self.piece.read_factor(chunk, rows)
        return (numerator, denominator) if factor is None else (numerator * factor[..., None], denominator * factor)


def _all(task: _Task) -> None:
    """Not causal: every query has read the sums of all keys."""
    piece, carried = task.piece, _upstream_sums(task)
    _queries_all(task, carried)
    for chunk in reversed(piece.chunks()):
        key_gradient, value_gradient = _fold_backward(piece, carried, chunk)
        piece.write(task.gradients["key"], chunk, key_gradient)
        piece.write(task.gradients["value"], chunk, value_gradient)
        _, decay = piece.fold_factors(chunk)
        if decay is not None:
            carried.decay(decay)


def _queries_all(task: _Task, carried: Sums) -> None:
    """Query gradients, and the gradient of the sums that the queries have read, added to `carried`."""
    piece = task.piece
    if not piece.inputs.query.shape[2]:
        return
    sums = piece.initial_sums()
    for chunk in piece.chunks():
        piece.fold(sums, chunk)
    for rows in piece.queries():
        query, upstream = piece.query(rows), task.rows(rows)
        piece.write_queries(task.gradients["query"], rows, sums.read_backward(query, *upstream))
        carried.add_read_gradient(query, *upstream)


def _upstream_sums(task: _Task) -> Sums:
    """The gradient of the final sums."""
    piece, carried = task.piece, task.piece.new_sums()
    if piece.plan.return_sums:
        carried.load_gradient(piece.whole(task.upstream.sums), piece.whole(task.upstream.normalizer))
    return carried


def _queries_causal(task: _Task) -> None:
    """In order: rebuild the sums; what reads them gets its gradient."""
    piece, sums = task.piece, task.piece.initial_sums()
    for chunk in piece.chunks():
        for rows in piece.short(chunk):
            gradient = sums.read_backward(piece.query(rows), *task.decayed_rows(chunk, rows))
            piece.write_queries(task.gradients["query"], rows, gradient)
        if chunk.stop < piece.length:
            piece.fold(sums, chunk)


def _keys_causal(task: _Task) -> None:
    """In reverse: carry the gradient of the sums; keys and values get theirs, from the sums and inside the chunk."""
    piece, carried = task.piece, _upstream_sums(task)
    for chunk in reversed(piece.chunks()):
        key_gradient, value_gradient = _fold_backward(piece, carried, chunk)
        if piece.plan.diagonal != Diagonal.NONE:
            _inner_backward(task, chunk, key_gradient, value_gradient)
        piece.write(task.gradients["key"], chunk, key_gradient)
        piece.write(task.gradients["value"], chunk, value_gradient)
        _, decay = piece.fold_factors(chunk)
        if decay is not None:
            carried.decay(decay)
        for rows in piece.short(chunk):
            carried.add_read_gradient(piece.query(rows), *task.decayed_rows(chunk, rows))
    if piece.inputs.sums is not None:
        piece.write_sums(task.gradients["sums"], task.gradients["normalizer"], carried.packed_gradient())


def _fold_backward(piece: Piece, carried: Sums, chunk: Stretch) -> tuple[Tensor, Tensor]:
    """Gradients of a chunk's key features (G, T, r) and values (G, T, h) through the sums they were folded into."""
    factor, _ = piece.fold_factors(chunk)
    parts = [
        carried.fold_backward(
            piece.key(rows), piece.value(rows), None if factor is None else factor[:, rows.within(chunk)]
        )
        for rows in piece.short(chunk)
    ]
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, 1), torch.cat(values, 1)


def _inner_backward(task: _Task, chunk: Stretch, key_gradient: Tensor, value_gradient: Tensor) -> None:
    """Gradients of the weights inside a chunk; those of sketched keys and of values are added to what is given."""
    piece, local_key = task.piece, task.piece.inputs.local_key
    if local_key is None:
        inner, target = key_gradient, "query"
    else:
        inner, target = key_gradient.new_zeros(piece.size, chunk.size, local_key.shape[3]), "local_query"
    for rows in piece.short(chunk):
        keys = piece.visible(chunk, rows)
        numerator, denominator = task.rows(rows)
        query, key, exponent, factors = piece.inner_operands(rows, keys)
        operands = list(zip(halves(query, factors), halves(key, factors), strict=True))
        scores = [torch.bmm(a, b.mT) for a, b in operands]
        weight, slopes = _weight_and_slopes(piece, scores, exponent, keys, rows)
        value_gradient[:, : keys.size].baddbmm_(weight.mT, numerator)
        change = torch.baddbmm(denominator[..., None], numerator, piece.value(keys).mT)
        changes = [slope.mul_(change) for slope in slopes]
        of_query = [torch.bmm(part, b) for part, (_, b) in zip(changes, operands, strict=True)]
        piece.write_queries(task.gradients[target], rows, _side_by_side(of_query), add=local_key is None)
        of_key = halves(inner[:, : keys.size], factors)
        for half, part, (a, _) in zip(of_key, changes, operands, strict=True):
            half.baddbmm_(part.mT, a)
    if local_key is not None:
        piece.write(task.gradients["local_key"], chunk, inner)


def _side_by_side(halves: list[Tensor]) -> Tensor:
    return halves[0] if len(halves) == 1 else torch.cat(halves, -1)


def _weight_and_slopes(
    piece: Piece, scores: list[Tensor], exponent: int, keys: Stretch, rows: Stretch
) -> tuple[Tensor, list[Tensor]]:
    """score^exponent, or the product of two scores, and the derivatives, masked and decayed; scores are used up."""
    score, *others = scores
    # s^(p-1) for even p is (s^2)^((p-2)/2) s; at p = 1 it is 1.
    slope = power_(score * score, (exponent - 2) // 2).mul_(score) if exponent > 1 else torch.ones_like(score)
    between = piece.decay_between(keys, rows)
    if between is not None:
        slope.mul_(between)
    piece.mask_(slope, rows)
    if not others:
        weight = score.mul_(slope)
        return weight, [slope.mul_(exponent)]
    masked, other = score.mul_(slope), others[0]
    return masked * other, [slope.mul_(other), masked]
