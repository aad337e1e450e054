"""sortLSH (HyperAttention, algorithm 1): keys sorted by hyperplanes' sides, where near vectors get near ranks."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.arguments import check_devices
from polysketch.ops.autocast import without_autocast
from polysketch.ops.hyper.exact_keys import Tiles

MAX_HASH_BITS = 62  # a code is one int64 of either use: bits, and a rank to sort by
_ROWS = 128  # slots of a tile where chunks have any number of queries: more are left empty in wider ones


def hash_codes(x: Tensor, hyperplanes: Tensor) -> Tensor:
    """The side of each hyperplane that a vector lies on, as one number: the sum over t of [x . h_t > 0] 2^t.

    Two vectors at the angle a share a bit with probability 1 - a / pi over Gaussian hyperplanes. The length of a
    vector does not matter. No gradient. Computed in float32 or better, also under autocast.

    Args:
        x: (..., head_dim), floating point.
        hyperplanes: (head_dim, bits), the normals; the same for queries and keys, and for every head.

    Returns:
        (...) int64 bucket ids from 0 to 2^bits - 1.

    Raises:
        ValueError: widths or devices that disagree, or fewer than 1 or more than 62 bits.
        TypeError: x is not floating point.

    Cost: 2 * bits * head_dim operations a vector.
    """
    if not x.is_floating_point():
        raise TypeError(f"vectors to hash must be floating point, got {x.dtype}")
    check_hyperplanes(hyperplanes, x.shape[-1] if x.dim() else 0)
    check_devices(vectors=x, hyperplanes=hyperplanes)
    with torch.no_grad(), without_autocast(x.device.type):
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        sides = x.to(dtype) @ hyperplanes.to(dtype) > 0
        places = torch.ones((), dtype=torch.int64, device=x.device) << torch.arange(sides.shape[-1], device=x.device)
        return (sides * places).sum(-1)


def gray_rank(codes: Tensor) -> Tensor:
    """The place of each bucket in the reflected Gray code, the inverse of r -> r xor (r >> 1).

    Buckets that follow one another differ in one bit, so that sorting by the rank brings vectors together that differ
    by few hyperplanes (HyperAttention, definition 1). The authors' code sorts by the Gray code of the bucket instead
    of by its inverse: there neighbours differ in up to 4 bits of 7.

    Args:
        codes: int64 bucket ids, not negative, as of `hash_codes`.

    Returns:
        int64 ranks, from 0 to 2^bits - 1, of the same shape.
    """
    rank = codes
    for shift in (1, 2, 4, 8, 16, 32):
        rank = rank ^ (rank >> shift)
    return rank


def check_hyperplanes(hyperplanes: Tensor, head_dim: int) -> None:
    """Refuse hyperplanes that are not (head_dim, 1 to 62 bits).

    Raises:
        ValueError: naming the expected and the received shape.
    """
    if hyperplanes.dim() != 2 or hyperplanes.shape[0] != head_dim:
        raise ValueError(
            f"hyperplanes must be (head_dim, bits) with head_dim = {head_dim}, got {tuple(hyperplanes.shape)}"
        )
    if not 1 <= hyperplanes.shape[1] <= MAX_HASH_BITS:
        raise ValueError(f"hyperplanes must be 1 to {MAX_HASH_BITS}, got {hyperplanes.shape[1]}")


class SortedKeys(NamedTuple):
    """The keys of a node in the order of their hashes.

    Attributes:
        order: (leads, chunks, chunk_size) int64, keys by rank; masked keys come last, then places beyond the end.
        real: (leads, chunks, chunk_size) bool.
        rank: (leads, n) int64, the sorted ranks; those of masked keys are above every rank.
        chunk: (leads, n) int64, the chunk of each key.
    """

    order: Tensor
    real: Tensor
    rank: Tensor
    chunk: Tensor


def ranks(x: Tensor, hyperplanes: Tensor, real: Tensor | None) -> Tensor:
    """Gray-code rank of each vector of (..., n, head_dim); one above them all where not real."""
    rank = gray_rank(hash_codes(x, hyperplanes))
    return rank if real is None else rank.masked_fill(~real, 2 ** hyperplanes.shape[1])


def sort_keys(key: Tensor, real: Tensor, hyperplanes: Tensor, chunk_size: int) -> SortedKeys:
    """Sort keys (batch, key_heads, nodes, n, head_dim) by their hashes; real (batch or 1, nodes, n)."""
    length = key.shape[-2]
    rank, order = ranks(key, hyperplanes, real.unsqueeze(1)).sort(dim=-1, stable=True)
    place = torch.empty_like(order).scatter_(-1, order, torch.arange(length, device=key.device).expand_as(order))
    # Divided here, not before it is scattered: inductor of PyTorch 2.13 makes zeros of that.
    chunk = place // chunk_size
    padding = (0, -length % chunk_size)
    exists = F.pad(rank < 2 ** hyperplanes.shape[1], padding)
    order = F.pad(order, padding)
    return SortedKeys(order.unflatten(-1, (-1, chunk_size)), exists.unflatten(-1, (-1, chunk_size)), rank, chunk)


def tiles_by_rank(query: Tensor, keys: SortedKeys, real: Tensor, hyperplanes: Tensor) -> Tiles:
    """sortLSH (HyperAttention, algorithm 1): query i and key j meet when they have places in the same chunk.

    Queries are sorted among themselves, so that a later one can move an earlier one: not for causal attention.

    Args:
        query: (batch, key_heads, nodes, groups, n, head_dim), as many as keys.
        keys: of `sort_keys`.
        real: (batch or 1, nodes, n) bool; queries that are not real are sorted behind the others.
        hyperplanes: (head_dim, bits).
    """
    groups, length = query.shape[-3:-1]
    chunks, chunk_size = keys.order.shape[-2:]
    order = ranks(query, hyperplanes, real[:, None, :, None]).sort(dim=-1, stable=True).indices
    place = torch.empty_like(order)
    place.scatter_(-1, order, torch.arange(length, device=query.device).expand_as(order))
    member = torch.arange(groups, device=query.device)[:, None]
    slot = place // chunk_size * (groups * chunk_size) + member * chunk_size + place % chunk_size
    padded = F.pad(order + member * length, (0, -length % chunk_size))
    tiles = padded.unflatten(-1, (chunks, chunk_size)).transpose(-3, -2).flatten(-2)
    number = torch.arange(chunks, device=query.device)
    return Tiles(tiles, slot.flatten(-2), keys.order, keys.real, keys.chunk, number)


def tiles_by_code(query: Tensor, keys: SortedKeys, hyperplanes: Tensor) -> Tiles:
    """Each query goes to the chunk with the middle one of the keys in its bucket, or that where they would be.

    No query depends on another. A chunk may get any number of queries: they fill tiles, of which at most one for each
    chunk is not full. Arguments as in `tiles_by_rank`, queries of any number.
    """
    groups, length = query.shape[-3:-1]
    chunks, chunk_size = keys.order.shape[-2:]
    rank = ranks(query, hyperplanes, None).flatten(-2)
    first, behind = (torch.searchsorted(keys.rank, rank, right=right) for right in (False, True))
    # Behind the last real key there may be masked ones: no bucket of theirs.
    last = (keys.real.flatten(-2).sum(-1, keepdim=True) - 1).clamp(min=0)
    chunk = torch.minimum((first + behind) // 2, last) // chunk_size
    rows = min(_ROWS, chunk_size)
    count = groups * length
    size = count // rows + min(chunks, count)  # tiles that are enough, however the queries fall
    ordered, order = chunk.sort(dim=-1, stable=True)
    edges = torch.searchsorted(ordered, _numbers(chunks + 1, rank))
    last_tile = ((edges.diff() + rows - 1) // rows).cumsum(-1)  # the tiles of chunk c end before last_tile[c]
    first_tile = F.pad(last_tile[..., :-1], (1, 0))
    steps = torch.arange(count, device=query.device)
    slot_of_ordered = first_tile.gather(-1, ordered) * rows + steps - edges.gather(-1, ordered)
    slot = torch.empty_like(order).scatter_(-1, order, slot_of_ordered)
    tiles = order.new_zeros(*order.shape[:-1], size * rows).scatter_(-1, slot_of_ordered, order)
    owner = torch.searchsorted(last_tile, _numbers(size, rank), right=True).clamp(max=chunks - 1)
    key, real = (x.gather(-2, owner[..., None].expand(*owner.shape, chunk_size)) for x in (keys.order, keys.real))
    return Tiles(tiles.unflatten(-1, (size, rows)), slot, key, real, keys.chunk, owner)


def _numbers(count: int, like: Tensor) -> Tensor:
    """0 .. count - 1 for each lead of `like`, contiguous, as searchsorted wants it."""
    return torch.arange(count, device=like.device).expand(*like.shape[:-1], -1).contiguous()
