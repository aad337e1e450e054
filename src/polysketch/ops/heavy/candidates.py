"""Each query's candidates: the keys of its bucket that are nearest before an index, or behind one.

Sorted by (bucket, index), the candidates of a query are a window of the keys. Sorted by (bucket, index) themselves,
queries have windows whose edges never fall.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_LAST = torch.iinfo(torch.int64).max


class SortedKeys(NamedTuple):
    """Keys in the order of (bucket, index); those of no bucket come last.

    Attributes:
        order: (leads, keys) int64, the index of the key of each rank.
        place: (leads, keys) int64, bucket * stride + index by rank.
        stride: above every index.
    """

    order: Tensor
    place: Tensor
    stride: int

    def rank(self, codes: Tensor, index: Tensor | int) -> Tensor:
        """How many keys come before (bucket, index); codes (leads, any), contiguous or not."""
        return torch.searchsorted(self.place, (codes * self.stride + index).contiguous())

    def before(self, codes: Tensor, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Ranks [lower, upper) of the last `size` keys of a bucket whose index is below `index`."""
        upper = self.rank(codes, index)
        return torch.maximum(self.rank(codes, 0), upper - size), upper

    def after(self, codes: Tensor, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Ranks [lower, upper) of the first `size` keys of a bucket whose index is at least `index`."""
        lower = self.rank(codes, index)
        return lower, torch.minimum(self.rank(codes, self.stride), lower + size)


class Windows(NamedTuple):
    """Queries in the order of their windows; `queries` of each lead, all leads in a row where one number is a row.

    Attributes:
        query_rows: (leads, queries) int64, rows of (leads * queries, width), sorted.
        key_rows: (leads * keys) int64, rows of (leads * keys, width) by rank.
        lower: (leads, queries) int64, the rank of each sorted query's first candidate among all leads' keys.
        upper: (leads, queries) int64, the rank behind its last one; not above `lower` where it has none.
    """

    query_rows: Tensor
    key_rows: Tensor
    lower: Tensor
    upper: Tensor


def sort_keys(codes: Tensor) -> SortedKeys:
    """Sort the keys of each lead.

    Args:
        codes: (leads, keys) int64 buckets; below zero for a key that is nobody's candidate.
    """
    stride = codes.shape[1] + 1
    index = torch.arange(codes.shape[1], device=codes.device)
    place, order = torch.where(codes < 0, _LAST, codes * stride + index).sort(dim=1, stable=True)
    return SortedKeys(order, place, stride)


def windows(query_codes: Tensor, keys: SortedKeys, edge: Tensor, size: int, *, behind: bool) -> Windows:
    """The window of every query.

    Args:
        query_codes: (leads, queries) int64 buckets.
        keys: of the same leads.
        edge: (leads, queries) int64: candidates are before this index, or from it on when `behind`.
        size: candidates of a query at most.
    """
    order = (query_codes * keys.stride + edge).argsort(dim=1, stable=True)
    codes, edge = query_codes.gather(1, order), edge.gather(1, order)
    lower, upper = (keys.after if behind else keys.before)(codes, edge, size)
    lead = torch.arange(len(order), device=order.device)[:, None]
    first_key = lead * keys.order.shape[1]
    return Windows(
        order + lead * order.shape[1], (keys.order + first_key).flatten(), lower + first_key, upper + first_key
    )
