"""Which queries meet which keys, by their places in the whole row: what one program takes for all spans at once."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.hyper.exact_keys import Tiles
from polysketch.ops.hyper.samples import Samples


class Meetings(NamedTuple):
    """Tiles of queries, each with the keys that all of its queries see; a query may be in several.

    Attributes:
        query: (batch, key_heads, tiles, rows) int32: the number of its head among those of the key head, times the
            number of queries, plus its token; -1 in an empty slot.
        key: (batch, key_heads, tiles, keys) int32, tokens.
        log_weight: (batch, key_heads, tiles, keys), the log of what each key counts; -inf where it does not.
        parts: tiles of each of some parts that follow one another; no query is in two tiles of a part.
    """

    query: Tensor
    key: Tensor
    log_weight: Tensor
    parts: tuple[int, ...]


class Places(NamedTuple):
    """Where the queries and the keys of some nodes stand in their rows.

    Attributes:
        query: (nodes,) int64, the token of each node's first query.
        key: (nodes,) int64, that of its first key.
        queries: of a head, in all.
    """

    query: Tensor
    key: Tensor
    queries: int


def meetings(
    tiles: Tiles, samples: Samples, key_count: Tensor, length: int, places: Places, dtype: torch.dtype
) -> Meetings:
    """Of every tile its own keys, each once, and the samples outside of these for all the others.

    Args:
        tiles: of the nodes.
        samples: of each node's keys.
        key_count: (batch, 1, nodes) real keys of each node.
        length: queries of a node's head.
        places: of the nodes.
        dtype: of the weights.
    """
    sampled = samples.key.unsqueeze(-2).expand(*tiles.key.shape[:-1], -1)
    weights = samples.log_weights(tiles.covers(samples.key), key_count, tiles.real.sum(-1))
    own = torch.zeros_like(tiles.key, dtype=weights.dtype).masked_fill(~tiles.real, -torch.inf)
    key = torch.cat([tiles.key, sampled], -1) + places.key[:, None, None]
    head, token = tiles.query // length, tiles.query % length + places.query[:, None, None]
    query = (head * places.queries + token).masked_fill(~_filled(tiles), -1)
    found = (query.int(), key.int(), torch.cat([own, weights], -1).to(dtype))
    places_of_query, places_of_key, log_weight = (x.flatten(2, 3) for x in found)
    return Meetings(places_of_query, places_of_key, log_weight, (places_of_query.shape[2],))


def _filled(tiles: Tiles) -> Tensor:
    """(leads, tiles, rows) bool, True for the slots that have a query: others repeat one."""
    slots = torch.zeros_like(tiles.query, dtype=torch.bool).flatten(-2)
    return slots.scatter(-1, tiles.slot, True).view_as(tiles.query)


def joined(parts: Iterator[Meetings]) -> Meetings:
    """All of them, one after another; tiles with fewer keys than others get some that do not count."""
    found = list(parts)
    keys = max(part.key.shape[-1] for part in found)
    query = torch.cat([part.query for part in found], 2)
    key = torch.cat([F.pad(part.key, (0, keys - part.key.shape[-1])) for part in found], 2)
    pad = [(0, keys - part.log_weight.shape[-1]) for part in found]
    weights = [F.pad(part.log_weight, size, value=-torch.inf) for part, size in zip(found, pad, strict=True)]
    return Meetings(query, key, torch.cat(weights, 2), tuple(size for part in found for size in part.parts))
