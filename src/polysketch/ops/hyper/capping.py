"""Estimated row sums held within bounds (HyperAttention, algorithm 2): no sample weighs too much, no sum too little."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.hyper.exact_keys import Tiles, take_rows
from polysketch.ops.hyper.samples import draw_uniform

_ENTRIES = 2**24  # scores of drawn queries worked on at once


class Capping(NamedTuple):
    """How tight the bounds are.

    Attributes:
        epsilon: the cap of a sampled weight is epsilon^2 m / (n log n) times (the exact part + tau / kappa).
        kappa: tau / kappa is the least that the sampled part counts.
    """

    epsilon: float
    kappa: float


def check_capping(capping: tuple[float, float] | None) -> Capping | None:
    """The option as a `Capping`, from any pair of numbers.

    Raises:
        ValueError: not a pair, an epsilon that is not above 0, or a kappa below 1; either infinite.
        TypeError: not numbers.
    """
    if capping is None:
        return None
    if not isinstance(capping, (tuple, list)) or len(capping) != 2:
        raise ValueError(f"capping must be a pair (epsilon, kappa) or None, got {capping!r}")
    if any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in capping):
        raise TypeError(f"capping must be two numbers (epsilon, kappa), got {capping!r}")
    epsilon, kappa = (float(x) for x in capping)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon of capping must be a number above 0, got {epsilon}")
    if not 1 <= kappa < math.inf:
        raise ValueError(f"kappa of capping must be a number from 1 on, got {kappa}")
    return Capping(epsilon, kappa)


class DrawnQueries(NamedTuple):
    """Queries drawn to find tau from; the same for the query heads of a key head.

    Attributes:
        query: (batch, key_heads, nodes, rows) int64, ascending where `running`.
        real: (batch, key_heads, nodes, rows) bool, False for those that do not count.
        running: each query knows of those only that are not after it.
    """

    query: Tensor
    real: Tensor
    running: bool


def draw_rows(query: Tensor, real: Tensor, start: Tensor, size: int, seed: int) -> DrawnQueries:
    """`size` different queries, each set of them equally likely, of attention without a causal mask.

    Args:
        query: (batch, key_heads, nodes, groups, n, head_dim).
        real: (batch or 1, nodes, n) bool.
        start: (nodes,) int64, the position of each node's first query.
        size: at least 1.
        seed: any whole number; keys drawn with it are others.
    """
    drawn = draw_uniform(query[..., 0, :, :], real, start, size, seed + 1)
    return DrawnQueries(drawn.key, drawn.real, False)


def draw_rows_in_order(key: Tensor, real: Tensor, start: Tensor, size: int, seed: int) -> DrawnQueries:
    """The first real query, and those at `size` places drawn among as many as there are keys, in their order.

    A place counts only where there is a real query. Which ones are drawn depends on no later query, nor on how many
    there are.

    Args:
        key: (batch, key_heads, nodes, n, head_dim), those of the first half of each span.
        real: (batch or 1, nodes, at most n) bool, of the queries in the second half.
        start: (nodes,) int64, the position of each node's first query.
        size: at least 1.
        seed: as in `draw_rows`.
    """
    places = draw_uniform(key, real.new_ones(1, *key.shape[2:4]), start, size, seed + 1).key
    first = real.to(torch.uint8).argmax(-1, keepdim=True)
    shape = (*places.shape[:-1], -1)
    index = torch.cat([first.unsqueeze(1).expand(shape), places], -1).sort(-1).values
    inside = index.clamp(max=real.shape[-1] - 1)
    return DrawnQueries(inside, real.unsqueeze(1).expand(shape).gather(-1, inside) & (index == inside), True)


@torch.no_grad()
def log_largest_rest(
    query: Tensor, key: Tensor, real: Tensor, tiles: Tiles, rows: DrawnQueries, scale: float
) -> Tensor:
    """log tau: the largest exact sum of the weights outside of S_j, over the queries j of `rows`.

    With `rows.running`, tau of a query is that of the rows up to it.

    Args:
        query: (batch, key_heads, nodes, groups, n, head_dim).
        key: (batch, key_heads, nodes, m, head_dim).
        real: (batch or 1, nodes, m) bool, of the keys.
        tiles: which keys are in S_j.
        rows: some of the queries.
        scale: factor on q . k.

    Returns:
        (batch, key_heads, nodes, groups, n), -inf where tau is zero. A constant to the backward pass.
    """
    groups, length = query.shape[-3:-1]
    member = torch.arange(groups, device=query.device)[:, None] * length
    drawn = (rows.query.unsqueeze(-2) + member).flatten(-2)
    at_once = max(1, _ENTRIES // max(1, drawn.shape[:-1].numel() * key.shape[-2]))
    sums = [_log_rest(query, key, real, tiles, some, scale) for some in drawn.split(at_once, -1)]
    sums = torch.cat(sums, -1).unflatten(-1, (groups, -1)).masked_fill(~rows.real.unsqueeze(-2), -torch.inf)
    if not rows.running:
        return sums.amax(-1, keepdim=True).expand(*sums.shape[:-1], length)
    position = torch.arange(length, device=query.device).expand(*rows.query.shape[:-1], -1).contiguous()
    known = torch.searchsorted(rows.query.contiguous(), position, right=True).sub(1).clamp(min=0)
    return sums.cummax(-1).values.gather(-1, known.unsqueeze(-2).expand(*sums.shape[:-1], -1))


def _log_rest(query: Tensor, key: Tensor, real: Tensor, tiles: Tiles, drawn: Tensor, scale: float) -> Tensor:
    """Log sums of the weights outside of S_j, (leads, r), for queries (leads, r) among groups * n."""
    length = key.shape[-2]
    tile = tiles.slot.gather(-1, drawn) // tiles.query.shape[-1]
    own, own_real = (x.gather(-2, tile[..., None].expand(*tile.shape, x.shape[-1])) for x in (tiles.key, tiles.real))
    hidden = torch.nn.functional.pad(~real, (0, 1), value=True)[:, None, :, None].expand(*drawn.shape, -1)
    # What a tile names, but does not attend to, goes to the place behind the last key.
    hidden = hidden.scatter(-1, own.masked_fill(~own_real, length), torch.ones_like(own_real))
    scores = take_rows(query.flatten(-3, -2), drawn) * scale @ key.mT
    return scores.masked_fill(hidden[..., :length], -torch.inf).logsumexp(-1)


def log_share(count: Tensor, sample_size: int, epsilon: float) -> Tensor:
    """log of epsilon^2 m / (n log n), for n = `count` keys of which m = min(sample_size, n) are drawn."""
    keys = count.clamp(min=2).double()
    return (epsilon**2 * keys.clamp(max=sample_size) / (keys * keys.log())).log()


def bounded_mass(
    exact_log_sum: Tensor,
    query: Tensor,
    sampled_key: Tensor,
    log_weights: Tensor,
    log_floor: Tensor,
    share: Tensor,
    scale: float,
) -> Tensor:
    """What samples add to the denominator, (leads, tiles, rows): the log of max(sum of c_l min(w_il, C_i), floor_i).

    C_i = exp(share) (the exact sum + floor_i). Logs throughout: no weight is computed that is not relative to a sum.

    Args:
        exact_log_sum: (leads, tiles, rows), the log of the sum over S_i.
        query: (leads, tiles, rows, head_dim).
        sampled_key: (leads, 1, m, head_dim).
        log_weights: (leads, tiles, m), the logs of c_l, -inf where a sample does not count.
        log_floor: (leads, tiles, rows), log(tau / kappa); no gradient.
        share: (batch or 1, 1, nodes), of `log_share`.
        scale: factor on q . k.
    """
    log_cap = _log_of_sum(exact_log_sum, log_floor) + share[..., None, None]
    log_cap = log_cap.masked_fill(log_cap == -torch.inf, torch.inf)  # there is nothing to compare with
    scores = torch.minimum(query * scale @ sampled_key.mT, log_cap.unsqueeze(-1)) + log_weights.unsqueeze(-2)
    unseen = (log_weights == -torch.inf).all(-1, keepdim=True)
    log_sum = scores.masked_fill(unseen.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(unseen, -torch.inf)
    return torch.maximum(log_sum, log_floor)


def _log_of_sum(one: Tensor, other: Tensor) -> Tensor:
    """log(exp(one) + exp(other)), with a gradient of zero where both are -inf."""
    blind = (one == -torch.inf) & (other == -torch.inf)
    return torch.logaddexp(one.masked_fill(blind, 0.0), other.masked_fill(blind, 0.0)).masked_fill(blind, -torch.inf)
