"""Linear attention chunk by chunk in plain PyTorch: linear time, memory of a few chunks; CPU and CUDA.

PolySketchFormer, section 3.1: with Z_l the sums over the chunks before chunk l,

    numerator_l = E(Q_l) Z_l + W_l V_l        Z_{l+1} = Z_l + E(K_l)^T V_l

where W_l holds the weights inside the chunk: exact, or sketched. A sequence here is *aligned*: its first token opens a
chunk (`alignment.py` brings padding and states into this form). Heads go in small groups and queries in short rows, so
that a piece stays in cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polysketch.ops.linear.packing import halves
from polysketch.ops.linear.piece import Group, Piece, shares
from polysketch.ops.linear.resolution import missing_mass
from polysketch.ops.linear.sums import Sums
from polysketch.ops.linear.types import Diagonal, Inputs, Outputs, Plan, Stretch
from polysketch.ops.parallel import run_in_parallel
from polysketch.ops.workspace import Workspace


def forward(inputs: Inputs, plan: Plan) -> Outputs:
    """The op on aligned inputs; see `polysketch.ops.linear_attention` for the formula."""
    outputs = Outputs.empty(inputs, plan)
    run = _forward_causal if plan.causal else _forward_all

    def work(share: Sequence[Group]) -> None:
        workspace = Workspace()
        for group in share:
            run(Piece(inputs, plan, group, workspace), outputs)

    run_in_parallel(work, shares(inputs))
    return outputs


def power_(x: Tensor, exponent: int) -> Tensor:
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


def _forward_all(piece: Piece, outputs: Outputs) -> None:
    """Not causal: every query, if there are any, reads the sums of all keys."""
    sums = piece.initial_sums()
    for chunk in piece.chunks():
        piece.fold(sums, chunk)
    for rows in piece.queries():
        numerator, denominator = sums.read(piece.query(rows))
        _write_rows(piece, outputs, rows, *_resolved(piece, sums, rows, None, numerator, denominator))
    if piece.plan.return_sums:
        piece.write_sums(outputs.sums, outputs.normalizer, sums.packed())


def _forward_causal(piece: Piece, outputs: Outputs) -> None:
    sums = piece.initial_sums()
    for chunk in piece.chunks():
        for rows in piece.short(chunk):
            _write_rows(piece, outputs, rows, *_chunk_rows(piece, sums, chunk, rows))
        if chunk.stop < piece.length or piece.plan.return_sums:
            piece.fold(sums, chunk)
    if piece.plan.return_sums:
        piece.write_sums(outputs.sums, outputs.normalizer, sums.packed())


def _chunk_rows(piece: Piece, sums: Sums, chunk: Stretch, rows: Stretch) -> tuple[Tensor, Tensor]:
    """Numerator (G, R, h) and denominator (G, R) of some queries of a chunk: from the sums, from inside it, offset."""
    numerator, denominator = sums.read(piece.query(rows))
    factor = piece.read_factor(chunk, rows)
    if factor is not None:
        numerator, denominator = numerator.mul_(factor[..., None]), denominator.mul_(factor)
    if piece.plan.diagonal != Diagonal.NONE:
        keys = piece.visible(chunk, rows)
        weights = _weights(piece, keys, rows)
        numerator.baddbmm_(weights, piece.value(keys))
        denominator.add_(weights.sum(-1))
    return _resolved(piece, sums, rows, factor, numerator, denominator)


def _resolved(
    piece: Piece, sums: Sums, rows: Stretch, factor: Tensor | None, numerator: Tensor, denominator: Tensor
) -> tuple[Tensor, Tensor]:
    """Numerator and denominator with the offset, and with the mass that the sums cannot resolve (`resolution.py`)."""
    denominator = denominator.add_(piece.plan.offset)
    if not piece.plan.normalize or piece.plan.power != 2 or sums.empty:
        return numerator, denominator
    query = piece.query(rows)
    squares = sums.read_squares(query)
    missing = missing_mass(denominator, squares if factor is None else squares * factor)
    if missing.device.type == "cpu" and not bool(missing.any()):  # a device would have to be waited for
        return numerator, denominator
    by = torch.where(missing > 0, missing / squares, 0.0)
    return sums.add_squares(query, by, numerator), denominator.add_(missing)


def _weights(piece: Piece, keys: Stretch, rows: Stretch) -> Tensor:
    """Weights inside a chunk (G, R, keys), masked and decayed."""
    query, key, exponent, factors = piece.inner_operands(rows, keys)
    shape = (piece.size, query.shape[1], key.shape[1])
    weights, *others = (
        torch.bmm(a, b.mT, out=piece.workspace.take(name, shape, query))
        for name, a, b in zip(("weights", "other scores"), halves(query, factors), halves(key, factors), strict=False)
    )
    power_(weights, exponent)
    for scores in others:
        weights.mul_(scores)
    between = piece.decay_between(keys, rows)
    if between is not None:
        weights.mul_(between)
    return piece.mask_(weights, rows)


def _write_rows(piece: Piece, outputs: Outputs, rows: Stretch, numerator: Tensor, denominator: Tensor) -> None:
    if piece.plan.normalize:
        numerator = numerator.mul_(piece.reciprocal(denominator)[..., None])
    piece.write_queries(outputs.output, rows, numerator)
    piece.write_queries(outputs.denominator, rows, denominator)
