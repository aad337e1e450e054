"""Windows cut into pairs of a tile of queries and a tile of keys, of which every candidate is in exactly one.

Both edges of the windows of sorted queries never fall, and a window has at most `size` keys, so the spans of keys of
all tiles together are at most keys + tiles * size long: the number of pairs has a bound that shapes alone give.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from polysketch.ops.heavy.candidates import Windows

QUERIES = 64
KEYS = 64
"""Rows of a tile."""


class Pairs(NamedTuple):
    """Tiles of sorted queries, and pairs of a tile with `KEYS` successive ranks of keys.

    Attributes:
        query_rows: (tiles, QUERIES) int64; at places beyond the end the last row of the same lead.
        lower, upper: (tiles, QUERIES) int64, windows; empty at places beyond the end.
        tile: (pairs,) int64, ascending.
        first: (pairs,) int64, the first rank of the keys.
        behind: (pairs,) int64, the rank behind the last key of the tile: behind a key of the same lead always.
    """

    query_rows: Tensor
    lower: Tensor
    upper: Tensor
    tile: Tensor
    first: Tensor
    behind: Tensor


def pairs_at_most(leads: int, queries: int, keys: int, size: int) -> int:
    """No codes and no edges give more pairs than this."""
    tiles = -(-queries // QUERIES)
    return leads * (tiles + (keys + (tiles - 1) * min(size, keys)) // KEYS)


def make_pairs(windows: Windows, size: int, *, count: bool) -> Pairs:
    """Cut windows into pairs.

    Args:
        windows: of at most `size` keys.
        size: candidates of a query at most.
        count: as many pairs as are needed, which the host must wait for; else as many as there can be, and the
            superfluous ones have no candidates.
    """
    leads, queries = windows.lower.shape
    keys = len(windows.key_rows) // leads
    lower, upper = (_tiles(x, torch.zeros_like(x[:, :1])) for x in (windows.lower, windows.upper))
    query_rows = _tiles(windows.query_rows, windows.query_rows[:, -1:])
    some = upper > lower
    # Whatever has no candidates points at its own lead all the same: zero times another row's number may be NaN.
    first_key = torch.arange(len(lower), device=lower.device) // (len(lower) // leads) * keys
    end = torch.where(some, upper, first_key[:, None]).amax(1)
    start = torch.where(some, lower, end[:, None]).amin(1)
    counts = (end - start + KEYS - 1) // KEYS
    total = counts.cumsum(0)
    number = int(total[-1]) if count else pairs_at_most(leads, queries, keys, size)
    pair = torch.arange(number, device=counts.device)
    tile = torch.searchsorted(total, pair, right=True).clamp(max=len(counts) - 1)
    first = start[tile] + (pair - (total - counts)[tile]) * KEYS
    return Pairs(query_rows, lower, upper, tile, first, torch.maximum(end, first_key + 1)[tile])


def _tiles(x: Tensor, behind: Tensor) -> Tensor:
    """(leads, queries) -> (tiles, QUERIES), each lead's (leads, 1) number `behind` after its last one."""
    return torch.cat([x, behind.expand(-1, -x.shape[1] % QUERIES)], 1).reshape(-1, QUERIES)
