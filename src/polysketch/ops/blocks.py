"""Attention by blocks of tokens, which see one another and all tokens before: what every op says of it, and shares."""

from collections.abc import Callable

import torch
from torch import Tensor

from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.linear.alignment import Alignment, leading_padding


def check_block_size(block_size: int, causal: bool) -> None:
    """Refuse a size of blocks that is none, or one beside attention that is not causal.

    Raises:
        TypeError: not an integer.
        ValueError: below one, or without `causal`.
    """
    check_at_least_one(block_size=block_size)
    if not causal:
        raise ValueError(
            f"block_size={block_size} is causal attention between blocks: it needs causal=True; without it all tokens"
            " see one another as they are"
        )


def check_fitting_blocks(block_size: int, **chunk: int) -> None:
    """Refuse blocks that would cut chunks, given under their name, at other places than their ends.

    Raises:
        ValueError: neither divides the other.
    """
    for name, size in chunk.items():
        if block_size % size and size % block_size:
            raise ValueError(f"block_size must divide {name} or be a multiple of it, got {block_size} and {size}")


def check_at_boundary(position: Tensor, block_size: int) -> None:
    """Refuse to go on inside a block: its earlier tokens have been answered without the later ones.

    Args:
        position: (batch,) int64 in host memory, tokens of each row so far.
        block_size: tokens of a block.

    Raises:
        ValueError: a row stands inside a block.
    """
    if not torch.compiler.is_compiling() and bool((position % block_size).any()):
        raise ValueError(
            f"a state must stand between two blocks of block_size={block_size} tokens, got rows after"
            f" {position.tolist()} tokens: give whole blocks, only the last one short"
        )


def seen_by_blocks(rows: slice, keys: slice, first_position: int, block_size: int, device: torch.device) -> Tensor:
    """(rows, keys) bool: whether a key's block is not after that of a query. Blocks count from the first query.

    Args:
        rows: some of the queries.
        keys: some of the keys.
        first_position: where the first query stands among the keys.
        block_size: tokens of a block.
        device: of the result.
    """
    of_rows = torch.arange(rows.start, rows.stop, device=device) // block_size
    of_keys = torch.arange(keys.start - first_position, keys.stop - first_position, device=device) // block_size
    return of_rows[:, None] >= of_keys


def hide_later(weights: Tensor, first_position: int, block_size: int) -> Tensor:
    """Weights (..., queries, keys) with zeros where a key's block is after that of the query."""
    if block_size == 1:
        return weights.tril(first_position)
    rows, keys = (slice(0, size) for size in weights.shape[-2:])
    seen = seen_by_blocks(rows, keys, first_position, block_size, weights.device)
    return weights.masked_fill(~seen, 0.0)


def in_aligned_rows(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    beside: tuple[Tensor, ...] = (),
) -> Tensor:
    """attend(query, key, value, *beside, key_mask=...) with every row's first real token in the place of the first.

    Blocks count from there, so rows that begin with padding are moved, and the output is moved back.

    Args:
        attend: the op.
        query: (batch, heads, length, head_dim).
        key, value: (batch, key_heads, key_length, width), the queries' own tokens being the last.
        key_mask: (batch, key_length) bool, True for a real token; None when all are.
        beside: more tensors (batch, heads, length, ...) of the queries.
    """
    earlier = key.shape[2] - query.shape[2]
    if key_mask is None:
        return attend(query, key, value, *beside, key_mask=None)
    started = key_mask[:, :earlier].any(1)
    start = torch.where(started, 0, leading_padding(key_mask[:, earlier:]))
    if not torch.compiler.is_compiling() and not bool(start.any()):
        return attend(query, key, value, *beside, key_mask=key_mask)
    alignment = Alignment(start, torch.zeros_like(start), 0, query.shape[2])

    def of_queries(x: Tensor) -> Tensor:
        return alignment.to_aligned(x if x.dim() == 4 else x[..., None]).view(x.shape)

    def of_keys(x: Tensor) -> Tensor:
        return torch.cat([x[:, :, :earlier], alignment.to_aligned(x[:, :, earlier:])], 2)

    real = of_keys(key_mask[:, None, :, None].to(torch.uint8))[:, 0, :, 0] > 0
    moved = (of_queries(query), of_keys(key), of_keys(value), *map(of_queries, beside))
    return alignment.from_aligned(attend(*moved, key_mask=real))
