"""Which queries attend to which keys exactly: tiles of queries, each with its keys; and those that a caller names."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Tiles(NamedTuple):
    """Tiles of queries, and the keys of each. `leads` stands for (batch, key_heads, nodes).

    Attributes:
        query: (leads, tiles, rows) int64, the query in each slot; empty slots repeat one.
        slot: (leads, queries) int64, the slot, tile * rows + row, of each query.
        key: (leads, tiles, keys) int64, the keys of each tile.
        real: (leads, tiles, keys) bool, False where there is no key to attend to.
        chunk: (leads, n) int64, the chunk of each key of the node.
        own: the chunk whose keys a tile has, (tiles) or (leads, tiles) int64; or, where a tile may have the keys of
            several, (leads, tiles, chunks) bool, the chunks that it has.
    """

    query: Tensor
    slot: Tensor
    key: Tensor
    real: Tensor
    chunk: Tensor
    own: Tensor

    def covers(self, sample: Tensor) -> Tensor:
        """(leads, tiles, m) bool: which of the keys `sample` (leads, m) are among a tile's."""
        chunk = self.chunk.gather(-1, sample).unsqueeze(-2)
        if self.own.dtype != torch.bool:
            return chunk == self.own.unsqueeze(-1)
        return self.own.gather(-1, chunk.expand(*self.own.shape[:-1], -1))


def take_rows(source: Tensor, index: Tensor) -> Tensor:
    """Rows of (..., n, width) at index (..., *shape): (..., *shape, width). Indices may repeat.

    As an embedding: its backward pass adds up whole rows, `gather`'s adds entry by entry.
    """
    lead, (length, width) = source.shape[:-2], source.shape[-2:]
    first = torch.arange(lead.numel(), device=source.device) * length
    flat = index.reshape(lead.numel(), -1) + first[:, None]
    return F.embedding(flat, source.reshape(-1, width)).view(*index.shape, width)


def check_heavy_mask(heavy: Tensor, query: Tensor, key: Tensor, chunk_size: int) -> None:
    """Refuse a mask that is not (batch or 1, heads or 1, query chunks, key chunks) of bool.

    Raises:
        ValueError: naming the expected and the received shape.
        TypeError: not bool.
    """
    if heavy.dtype != torch.bool:
        raise TypeError(f"heavy_mask must be bool with True for chunks attended exactly, got {heavy.dtype}")
    chunks = tuple(-(-x.shape[2] // chunk_size) for x in (query, key))
    fits = heavy.dim() == 4 and heavy.shape[0] in (1, query.shape[0]) and heavy.shape[1] in (1, query.shape[1])
    if not fits or tuple(heavy.shape[2:]) != chunks:
        raise ValueError(
            f"heavy_mask must be (batch or 1, heads or 1, query chunks, key chunks) with {chunks[0]} and {chunks[1]}"
            f" chunks of {chunk_size}, got {tuple(heavy.shape)}"
        )


def mask_of_second_halves(heavy: Tensor, first: int, nodes: int, chunks: int, half: int) -> Tensor:
    """What `heavy` says of the second half of each of some spans to its first half.

    Args:
        heavy: (batch or 1, heads or 1, query chunks, key chunks) bool.
        first: the chunk with which the first span begins.
        nodes: how many spans follow one another.
        chunks: of each span.
        half: chunks of its first half.

    Returns:
        (batch or 1, heads or 1, nodes, chunks - half, half) bool.
    """
    tokens = slice(first, first + nodes * chunks)
    pairs = heavy[..., tokens, tokens].unflatten(-2, (nodes, chunks)).unflatten(-1, (nodes, chunks))
    return pairs.diagonal(dim1=-4, dim2=-2).movedim(-1, 2)[..., half:, :half]


def tiles_by_mask(query: Tensor, real: Tensor, heavy: Tensor, chunk_size: int) -> Tiles:
    """A tile for each chunk of queries and each query head, with the keys of all chunks that the mask names for it.

    Args:
        query: (batch, key_heads, nodes, groups, n, head_dim).
        real: (batch or 1, nodes, m) bool.
        heavy: (batch or 1, heads or 1, nodes, query chunks, key chunks) bool.
        chunk_size: tokens of a chunk.
    """
    batch, heads, nodes, groups, length, _ = query.shape
    heavy = heavy.expand(batch, heads * groups, -1, -1, -1).unflatten(1, (heads, groups)).movedim(2, 3)
    chunks = heavy.shape[-2]
    position = torch.arange(chunks * chunk_size, device=query.device).view(chunks, chunk_size)
    member = torch.arange(groups, device=query.device)
    tiles = member[:, None, None] * length + position.clamp(max=length - 1)
    slot = member[:, None] * chunks * chunk_size + torch.arange(length, device=query.device)
    named = heavy.flatten(3, 4)  # (batch, key_heads, nodes, tiles, key chunks)
    width = max(1, int(named.sum(-1).max()))
    flag, chunk = (x[..., :width] for x in named.to(torch.uint8).sort(dim=-1, descending=True, stable=True))
    key = (chunk[..., None] * chunk_size + torch.arange(chunk_size, device=query.device)).flatten(-2)
    inside = key.clamp(max=real.shape[-1] - 1)
    seen = real[:, None, :, None].expand(batch, heads, -1, key.shape[-2], -1).gather(-1, inside)
    seen = seen & (key == inside) & flag.bool().repeat_interleave(chunk_size, -1)
    leads = (batch, heads, nodes)
    chunk_of_key = torch.arange(real.shape[-1], device=query.device) // chunk_size
    return Tiles(
        tiles.flatten(0, 1).expand(*leads, -1, -1),
        slot.flatten().expand(*leads, -1),
        inside,
        seen,
        chunk_of_key.expand(*leads, -1),
        named,
    )
