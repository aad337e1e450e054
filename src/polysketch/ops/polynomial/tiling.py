"""How the matrix of polynomial weights is cut up: tiles of a few heads, and blocks of rows and keys inside a tile.

Shapes: P pairs of (batch item, key head) in a tile, g query heads to a key head, R rows and K keys in a block. The g
query heads of a key head stand below one another as g * R rows, so that they share its keys without a copy of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polysketch.ops.blocks import seen_by_blocks
from polysketch.ops.polynomial.reference import real_tokens, working_dtype


@dataclass(frozen=True)
class BlockSize:
    """Rows and keys of a block, and the number of weights in memory at once over all heads of a tile."""

    rows: int
    keys: int
    weights: int


# On a CPU the blocks of one tile fit its cache (1 MB in float32); on a GPU they are large enough to fill it.
BLOCK_SIZES = {"cpu": BlockSize(256, 256, 4 * 256 * 256), "cuda": BlockSize(1024, 2048, 16 * 1024 * 2048)}


@dataclass(frozen=True)
class Tile:
    """Some batch items and key heads that are worked on together, and the memory that their blocks of weights share.

    Everything that is read comes out in the working dtype and three-dimensional, ready for ``torch.bmm``.
    """

    batches: slice
    heads: slice
    groups: int
    query_length: int
    key_length: int
    rows: int
    keys: int
    first_position: int | None
    block_size: int
    dtype: torch.dtype
    buffers: tuple[Tensor, ...]

    def row_blocks(self) -> Iterator[slice]:
        """The blocks of query rows."""
        for start in range(0, self.query_length, self.rows):
            yield slice(start, min(start + self.rows, self.query_length))

    def key_blocks(self, rows: slice) -> Iterator[slice]:
        """The blocks of keys that some row of ``rows`` sees; under causal attention the later ones are left out."""
        visible = self.key_length
        if self.first_position is not None:
            visible = min(visible, self.first_position + -(-rows.stop // self.block_size) * self.block_size)
        for start in range(0, visible, self.keys):
            yield slice(start, min(start + self.keys, visible))

    def read_rows(self, tensor: Tensor, rows: slice) -> Tensor:
        """Rows of (batch, heads, query_length, width) as (P, g * R, width)."""
        part = tensor.unflatten(1, (-1, self.groups))[self.batches, self.heads, :, rows].to(self.dtype)
        return part.reshape(-1, self.groups * part.shape[3], part.shape[4])

    def write_rows(self, tensor: Tensor, rows: slice, content: Tensor) -> None:
        """The inverse of ``read_rows``."""
        part = tensor.unflatten(1, (-1, self.groups))[self.batches, self.heads, :, rows]
        part.copy_(content.view(part.shape))

    def read_keys(self, tensor: Tensor, key_mask: Tensor | None) -> Tensor:
        """All positions of (batch, key_heads, key_length, width) as (P, key_length, width), padding zeroed."""
        key_mask = None if key_mask is None else key_mask[self.batches]
        return real_tokens(tensor[self.batches, self.heads].to(self.dtype), key_mask).flatten(0, 1)

    def write_keys(self, tensor: Tensor, content: Tensor) -> None:
        """The inverse of ``read_keys``."""
        part = tensor[self.batches, self.heads]
        part.copy_(content.view(part.shape))

    def buffer(self, index: int, rows: Tensor, columns: slice) -> Tensor:
        """Uninitialised (P, g * R, K) for the block of ``rows`` (P, g * R, ...) and ``columns``."""
        shape = (rows.shape[0], rows.shape[1], columns.stop - columns.start)
        return self.buffers[index][: shape[0] * shape[1] * shape[2]].view(shape)

    def hide_future_(self, block: Tensor, rows: slice, columns: slice) -> Tensor:
        """Zero, in place, what a row must not see of a block (P, g * R, K); only blocks on the diagonal are touched."""
        if self.first_position is None or columns.stop <= self.first_position + rows.start + 1:
            return block
        by_group = block.unflatten(1, (self.groups, -1))
        if self.block_size == 1:
            by_group.tril_(self.first_position + rows.start - columns.start)
        else:
            seen = seen_by_blocks(rows, columns, self.first_position, self.block_size, block.device)
            by_group.masked_fill_(~seen, 0.0)
        return block


def tiles(
    query: Tensor, key: Tensor, value: Tensor, first_position: int | None, block_size: int, num_buffers: int
) -> Iterator[Tile]:
    """Tiles that cover all heads of the batch; within one, at most ``BlockSize.weights`` weights exist at a time.

    Args:
        query: (batch, heads, query_length, head_dim).
        key: (batch, key_heads, key_length, head_dim).
        value: (batch, key_heads, key_length, value_dim).
        first_position: position of the first query among the keys, or None when every query sees every key.
        block_size: rows that see one another's keys, counted from the first query.
        num_buffers: blocks of weights that the caller holds at once.
    """
    batch, key_heads, groups = key.shape[0], key.shape[1], query.shape[1] // key.shape[1]
    dtype = working_dtype(query, key, value)
    size = BLOCK_SIZES.get(query.device.type, BLOCK_SIZES["cpu"])
    rows = min(size.rows, query.shape[2])
    keys = min(size.rows * size.keys // rows, key.shape[2])  # few rows, as in decoding: long blocks of keys
    pairs = min(max(size.weights // (groups * rows * keys), 1), batch * key_heads)
    heads_per_tile = min(pairs, key_heads)
    batches_per_tile = max(pairs // key_heads, 1)
    count = heads_per_tile * batches_per_tile * groups * rows * keys
    buffers = tuple(torch.empty(count, dtype=dtype, device=query.device) for _ in range(num_buffers))
    for first_batch in range(0, batch, batches_per_tile):
        for first_head in range(0, key_heads, heads_per_tile):
            yield Tile(
                batches=slice(first_batch, first_batch + batches_per_tile),
                heads=slice(first_head, first_head + heads_per_tile),
                groups=groups,
                query_length=query.shape[2],
                key_length=key.shape[2],
                rows=rows,
                keys=keys,
                first_position=first_position,
                block_size=block_size,
                dtype=dtype,
                buffers=buffers,
            )
