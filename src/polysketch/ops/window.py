"""Attention to nearby tokens only, in linear time: a sliding window of softmax, aligned chunks of exact polynomials."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.arguments import (
    check_at_least_one,
    check_attention_tensors,
    check_cache_lengths,
    check_causal_lengths,
)
from polysketch.ops.linear.alignment import Alignment, align, leading_padding
from polysketch.ops.polynomial import polynomial_attention
from polysketch.ops.softmax import masked_attention

_MULTIPLE = 8  # of a width, for CUDA's fused kernels with a mask
_ROWS = 256  # queries that are worked on together; each looks at window + 255 keys, of which it keeps window


class BesideKey(NamedTuple):
    """One more key for every query, beside those of its window, with a logit and a value of its own.

    Attributes:
        logit: (batch, heads, length), as it stands in the softmax; -inf for none.
        value: (batch, heads, length, value_dim).
    """

    logit: Tensor
    value: Tensor


class OpenChunk(NamedTuple):
    """The tokens of a local chunk that earlier calls have left open.

    Attributes:
        key: (batch, key_heads, chunk, head_dim); a row's first `fill` tokens count, a masked one is a key of zeros.
        value: (batch, key_heads, chunk, value_dim).
        position: (batch,) int64, tokens of each row so far, counted from its first real one; modulo the chunk, `fill`.
    """

    key: Tensor
    value: Tensor
    position: Tensor


def sliding_window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    beside: BesideKey | None = None,
) -> Tensor:
    """Softmax attention to the last `window` tokens: token i sees i - window + 1 .. i, itself included.

    Without `causal` it sees as many on its other side too: |i - j| < window. A masked token takes a place in the
    window, and padding before a row's first real token is never in one, so left padding changes nothing.

    Args:
        query: (batch, heads, length, head_dim).
        key: (batch, key_heads, length, head_dim); `heads` is a multiple of `key_heads` (grouped queries).
        value: (batch, key_heads, length, value_dim); value_dim may differ from head_dim.
        window: tokens that a token sees, at least 1.
        causal: none of them later than itself.
        key_mask: (batch, length) bool, True for a real token; masked keys get no weight.
        scale: factor on q . k; 1 / sqrt(head_dim) when None.
        beside: one more key for every query, as the sum over all tokens before its window may be.

    Returns:
        (batch, heads, length, value_dim). A query that sees no real key, nor one beside, gets zeros.

    Raises:
        ValueError: a window below 1, shapes or devices that disagree, queries not as many as keys.
        TypeError: a size that is no integer, dtypes that are not floating point or not alike, a mask that is not bool.

    Cost: 2 * length * (window + 255) * (head_dim + value_dim) operations a head, and with a key beside widths of one
    more; memory linear in the length.
    """
    check_attention_tensors(query, key, value, key_mask)
    check_causal_lengths(query, key)
    return _beside(query, key, value, beside, window, 0 if causal else window - 1, key_mask, scale)


def sliding_window_attention_with_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    beside: BesideKey | None = None,
) -> Tensor:
    """Causal sliding-window attention of the last n queries of a sequence over m keys, for decoding with a cache.

    Query i of n stands at position m - n + i of the keys; the first window - 1 queries need keys from before the
    first, so that a cache of the last window - 1 tokens is enough. Arguments as in `sliding_window_attention`.

    Returns:
        (batch, heads, n, value_dim). A query that sees no real key, nor one beside, gets zeros.

    Raises:
        ValueError: more queries than keys, or as in `sliding_window_attention`.
        TypeError: as in `sliding_window_attention`.
    """
    check_attention_tensors(query, key, value, key_mask)
    check_cache_lengths(query, key)
    return _beside(query, key, value, beside, window, 0, key_mask, scale)


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    degree: int = 4,
    chunk: int = 1024,
    offset: float = 1.0,
    causal: bool = False,
    key_mask: Tensor | None = None,
    opened: OpenChunk | None = None,
) -> Tensor:
    """Exact polynomial attention inside aligned chunks: o_i = sum_j w_ij v_j / (offset + sum_j w_ij).

    w_ij = (q_i . k_j)^degree where i and j share a chunk, i // chunk = j // chunk, and nothing elsewhere: the local
    part of polysketch attention (PolySketchFormer, section 3.2) without its prefix. Positions count from a row's
    first real token. Weights and sums are float32 or better, as in `polynomial_attention`.

    Args:
        query: (batch, heads, length, head_dim).
        key: (batch, key_heads, length, head_dim); `heads` is a multiple of `key_heads` (grouped queries).
        value: (batch, key_heads, length, value_dim).
        degree: even, at least 2.
        chunk: tokens of a chunk, at least 1.
        offset: added to the sum of weights.
        causal: token i sees tokens up to and including itself only.
        key_mask: (batch, length) bool, True for a real token.
        opened: tokens of the same sequences from before the first of these, in whose chunk these go on; causal only.

    Returns:
        (batch, heads, length, value_dim) in the dtype of value; zeros where padding precedes a row.

    Raises:
        ValueError: a chunk below 1, `opened` without `causal`, or as in `polynomial_attention`.
        TypeError: a chunk that is no integer, or as in `polynomial_attention`.

    Cost: 2 * length * chunk * (head_dim + value_dim) operations a head, half of it when causal; memory linear in the
    length. Queries that follow an open chunk cost as much as those of the whole chunk.
    """
    check_attention_tensors(query, key, value, key_mask)
    check_causal_lengths(query, key)
    check_at_least_one(chunk=chunk)
    if opened is not None and not causal:
        raise ValueError("an open chunk goes on with later tokens: it needs causal=True, got causal=False")
    options = {"degree": degree, "offset": offset, "causal": causal}
    alignment = align(key_mask, None, key) if opened is None else behind_open_chunk(opened, key_mask, key, chunk)
    if key_mask is not None:
        key, value = (x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (key, value))
    if alignment is None:
        return _attend_in_chunks(query, key, value, chunk, options)
    query = alignment.to_aligned(query)
    key = alignment.to_aligned(key, None if opened is None else opened.key)
    value = alignment.to_aligned(value, None if opened is None else opened.value)
    return alignment.from_aligned(_attend_in_chunks(query, key, value, chunk, options))


def _beside(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beside: BesideKey | None,
    window: int,
    ahead: int,
    key_mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """The window's softmax with one more key, which `_sliding_window` puts before each span of keys.

    One more entry of queries holds its logit, and meets a one in that key alone. One more entry of values is a one for
    that key alone, and so its share of the mass comes out: a difference from one would lose small shares in 16 bits.
    """
    if beside is None:
        return _sliding_window(query, key, value, window, ahead, key_mask, scale)
    _check_beside(query, value, beside)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    (head_dim, value_dim), limit = (query.shape[3], value.shape[3]), torch.finfo(_computed_in(query)).max / 4
    # Without a key there: a weight of zero, and a gradient that is a number.
    logit = beside.logit.clamp(-limit, limit).to(query.dtype)[..., None]
    more_key, more_value = (1 + (-(width + 1) % _MULTIPLE if query.is_cuda else 0) for width in (head_dim, value_dim))
    query = F.pad(torch.cat([query * scale, logit], -1), (0, more_key - 1))
    key, value = F.pad(key, (0, more_key)), F.pad(value, (0, more_value))
    first = _unit_row(key, head_dim), _unit_row(value, value_dim)
    found = _sliding_window(query, key, value, window, ahead, key_mask, 1.0, first)
    near, share = found[..., :value_dim], found[..., value_dim : value_dim + 1]
    none = (beside.logit == float("-inf"))[..., None]
    return near + share.masked_fill(none, 0.0) * beside.value.to(near.dtype)


def _computed_in(query: Tensor) -> torch.dtype:
    """The dtype of PyTorch's attention kernels, which autocast chooses for all but float64."""
    device = query.device.type
    cast = torch.is_autocast_enabled(device) and query.dtype != torch.float64
    return torch.get_autocast_dtype(device) if cast else query.dtype


def _unit_row(like: Tensor, entry: int) -> Tensor:
    """(batch, heads, 1, width): one token of zeros, but a one at `entry`."""
    row = like.new_zeros(*like.shape[:2], 1, like.shape[3])
    row[..., entry] = 1.0
    return row


def _check_beside(query: Tensor, value: Tensor, beside: BesideKey) -> None:
    expected = query.shape[:3], (*query.shape[:3], value.shape[3])
    if (beside.logit.shape, beside.value.shape) != expected:
        found = tuple(beside.logit.shape), tuple(beside.value.shape)
        raise ValueError(f"beside: expected a logit and a value of {tuple(map(tuple, expected))}, got {found}")


def _sliding_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    ahead: int,
    key_mask: Tensor | None,
    scale: float | None,
    first: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Rows of `_ROWS` queries at a time, each over the span of keys that some row of it sees.

    Every span begins with the key and value of `first`, (batch, key_heads, 1, width) each, if there are any.
    """
    check_at_least_one(window=window)
    length, earlier = query.shape[2], key.shape[2] - query.shape[2]
    behind, ahead = min(window - 1, key.shape[2] - 1), min(ahead, length - 1)
    rows = min(_ROWS, length)
    span = behind + rows + ahead
    # The span of row block t starts `behind` tokens before its first query; beyond the ends it holds padding.
    padding = (behind - earlier, -length % rows + ahead)
    keys, values = (F.pad(x, (0, 0, *padding)).unfold(2, span, rows).unbind(2) for x in (key, value))
    real = torch.ones(1, key.shape[2], dtype=torch.bool, device=key.device) if key_mask is None else key_mask
    reals = F.pad(real, padding, value=False).unfold(1, span, rows).unbind(1)
    near = torch.ones(rows, span, dtype=torch.bool, device=key.device).triu().tril(behind + ahead)
    if first is not None:
        keys = tuple(torch.cat([first[0].mT, x], -1) for x in keys)
        values = tuple(torch.cat([first[1].mT, x], -1) for x in values)
        # Not by a padding of true: Inductor (2.13) writes C++ for it that does not compile.
        reals = tuple(torch.cat([torch.ones_like(x[:, :1]), x], 1) for x in reals)
        near = torch.cat([torch.ones_like(near[:, :1]), near], 1)
    outputs = [
        masked_attention(q, k.mT, v.mT, scale, allowed=near[: q.shape[2]] & mask[:, None, None, :])
        for q, k, v, mask in zip(query.split(rows, 2), keys, values, reals, strict=True)
    ]
    return torch.cat(outputs, 2)


def behind_open_chunk(opened: OpenChunk, key_mask: Tensor | None, new: Tensor, chunk: int) -> Alignment:
    """New tokens go behind those of the open chunk, without what padding precedes a row's first real token."""
    position = opened.position.to(new.device)
    start = torch.zeros_like(position) if key_mask is None else leading_padding(key_mask)
    return Alignment(torch.where(position > 0, 0, start), position % chunk, chunk, new.shape[2])


def _attend_in_chunks(query: Tensor, key: Tensor, value: Tensor, chunk: int, options: dict) -> Tensor:
    """Aligned rows: chunks become items of the batch. A key of zeros, masked or behind the end, has no weight."""
    length = query.shape[2]
    if length <= chunk:
        return polynomial_attention(query, key, value, **options)
    chunks = (F.pad(x, (0, 0, 0, -length % chunk)).unflatten(2, (-1, chunk)) for x in (query, key, value))
    output = polynomial_attention(*(x.transpose(1, 2).flatten(0, 1) for x in chunks), **options)
    return output.unflatten(0, (query.shape[0], -(-length // chunk))).transpose(1, 2).flatten(2, 3)[:, :, :length]
