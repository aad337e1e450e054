"""Causal attention by halves whose places are fixed (HyperAttention, algorithm 4): later tokens move no earlier row."""

from collections.abc import Iterator

import torch
from torch import Tensor

from polysketch.ops.hyper.cross import Options, attend_approximately
from polysketch.ops.hyper.given import mask_of_second_halves
from polysketch.ops.hyper.partial import Partial, attend_causally, merge


def attend_by_halves(
    query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, min_length: int, options: Options
) -> Partial:
    """Exact inside blocks of `min_length` tokens, then for spans of 1, 2, 4, ... blocks the second half to the first.

    Args:
        query: (batch, key_heads, groups, n, head_dim).
        key: (batch, key_heads, n, head_dim).
        value: (batch, key_heads, n, value_dim).
        real: (batch, n) bool, False for keys that nobody sees; None when all are seen.
        min_length: tokens of a block.
        options: of the op.

    Returns:
        Partial of (batch, key_heads, groups, n).
    """
    result = _inside_blocks(query, key, value, real, min_length, options.scale)
    seen = torch.ones(1, key.shape[2], dtype=torch.bool, device=key.device) if real is None else real
    half = min_length
    while half < key.shape[2]:
        result = _with_first_halves(result, query, key, value, seen, half, options)
        half *= 2
    return result


def _inside_blocks(query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, block: int, scale: float) -> Partial:
    """Exact causal attention inside aligned blocks, the last of which may be shorter."""
    batch, heads, _, length, _ = query.shape
    parts = []
    for span, size in _spans(length, block):
        queries, keys, values = (x[..., span, :].unflatten(-2, (-1, size)) for x in (query, key, value))
        mask = None if real is None else real[:, None, span].expand(-1, heads, -1).reshape(-1, size)
        part = attend_causally(
            queries.movedim(3, 2).flatten(0, 2), keys.flatten(0, 2), values.flatten(0, 2), mask, scale
        )
        blocks = (batch, heads, -1)
        output = part.output.unflatten(0, blocks).movedim(2, 3).flatten(3, 4)
        parts.append(Partial(output, part.log_sum.unflatten(0, blocks).movedim(2, 3).flatten(3, 4)))
    return _joined(parts)


def _with_first_halves(
    result: Partial, query: Tensor, key: Tensor, value: Tensor, real: Tensor, half: int, options: Options
) -> Partial:
    """`result`, in which the second half of each span of 2 * half tokens has seen the first half, too."""
    parts = []
    for span, size in _spans(query.shape[3], 2 * half):
        before = Partial(result.output[:, :, :, span], result.log_sum[:, :, :, span])
        if size <= half:
            parts.append(before)
            continue
        queries, keys, values = (x[..., span, :].unflatten(-2, (-1, size)) for x in (query, key, value))
        crossing = attend_approximately(
            queries[..., half:, :].movedim(3, 2),
            keys[..., :half, :],
            values[..., :half, :],
            real[:, span].unflatten(1, (-1, size))[..., :half],
            start=span.start + size * torch.arange(keys.shape[2], device=key.device),
            by_rank=False,
            options=_inside_spans(options, span, size, half),
            later=real[:, span].unflatten(1, (-1, size))[..., half:],
        )
        halves = [x.unflatten(3, (-1, size)).tensor_split([half], dim=4) for x in before]
        after = merge(Partial(halves[0][1], halves[1][1]), Partial(*(x.movedim(2, 3) for x in crossing)))
        both = zip(halves, after, strict=True)
        parts.append(Partial(*(torch.cat([first, second], 4).flatten(3, 4) for (first, _), second in both)))
    return _joined(parts)


def _inside_spans(options: Options, span: slice, size: int, half: int) -> Options:
    """The options of the second halves of spans of `size` tokens to the first: with their part of a given mask."""
    if options.heavy is None:
        return options
    chunk = options.chunk_size
    nodes, chunks = (span.stop - span.start) // size, -(-size // chunk)
    return options._replace(
        heavy=mask_of_second_halves(options.heavy, span.start // chunk, nodes, chunks, half // chunk)
    )


def _spans(length: int, size: int) -> Iterator[tuple[slice, int]]:
    """The tokens in whole spans of `size`, and then those of the rest; with the size of a span in each."""
    whole = length // size * size
    if whole:
        yield slice(0, whole), size
    if whole < length:
        yield slice(whole, length), length - whole


def _joined(parts: list[Partial]) -> Partial:
    """Parts that follow one another along the tokens."""
    return parts[0] if len(parts) == 1 else Partial(*(torch.cat(tensors, 3) for tensors in zip(*parts, strict=True)))
