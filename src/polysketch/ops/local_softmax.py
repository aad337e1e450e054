"""Exact softmax weights inside aligned chunks, and sums of all other weights from elsewhere, under one denominator."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.autocast import without_autocast
from polysketch.ops.blocks import seen_by_blocks
from polysketch.ops.linear.alignment import align
from polysketch.ops.local import OpenChunk, behind_open_chunk, mask_in_chunks
from polysketch.ops.softmax import masked_attention

# The score of what has no weight: its exponential is 0 beside any other, and it stays finite times 0 or 1.
_NEVER = -1e30
_WIDTHS = 8  # fused kernels on a GPU want widths that are multiples of it


class RemainingSums(NamedTuple):
    """What the tokens outside a query's chunk add up to, over exp(log_scale).

    Attributes:
        sums: (batch, heads, length, value_dim + 1), the sum of weights times values, and last the sum of weights.
        log_scale: (batch, heads, length), the logarithm of what each row's sums have been divided by.
    """

    sums: Tensor
    log_scale: Tensor


def local_softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    remaining: RemainingSums,
    *,
    chunk: int,
    causal: bool = False,
    block_size: int | None = None,
    key_mask: Tensor | None = None,
    opened: OpenChunk | None = None,
) -> tuple[Tensor, Tensor]:
    """o_i = (sum_j exp(q_i . k_j) v_j + exp(c_i) N_i) / (sum_j exp(q_i . k_j) + exp(c_i) D_i), j in the chunk of i.

    N_i, D_i and c_i are those of `remaining`. All of it is one call of PyTorch's fused softmax attention: each chunk is
    preceded by one more key, which stands for the rest: the score of query i with it is c_i + log D_i, an entry that
    the query carries. So no exponential overflows, no n x chunk matrix is held, and gradients reach everything.

    Args:
        query: (batch, heads, length, head_dim), scaled already (by 1 / sqrt(head_dim) for softmax attention); float32
            or float64, like all inputs.
        key: (batch, key_heads, length, head_dim).
        value: (batch, key_heads, length, value_dim + 1), values and a last column of ones; all zeros where masked.
        remaining: the rest, for each query.
        chunk: tokens of a chunk, which are counted from a row's first real token.
        causal: token i sees tokens up to and including itself only; else its whole chunk.
        block_size: as for `local_attention`.
        key_mask: (batch, length) bool, True for a real token.
        opened: tokens of the same sequences from before the first of these, in whose chunk these go on, with values as
            above; causal only.

    Returns:
        Output (batch, heads, length, value_dim), and the share of the weight that the rest holds (batch, heads,
        length). A query that sees no real key gets zeros.

    Cost: 2 length chunk (head_dim + value_dim) operations a head, half of it when causal; memory linear in the length.
    Of one query after an open chunk, one row of that.
    """
    total = remaining.sums[..., -1]
    empty = total <= 0
    log_mass = (total.masked_fill(empty, 1.0).log() + remaining.log_scale).masked_fill(empty, _NEVER)
    mean = remaining.sums[..., :-1] / total.masked_fill(empty, 1.0)[..., None]
    queries = torch.cat([query, log_mass[..., None], torch.ones_like(log_mass[..., None])], -1)
    if key_mask is not None:
        key = key.masked_fill(~key_mask[:, None, :, None], 0.0)
    mask = mask_in_chunks(chunk, causal, block_size)
    with without_autocast(query.device.type):
        if opened is not None and query.shape[2] == 1:
            result = _attend_one(queries, key, value, opened)
        else:
            result = _attend_aligned(queries, key, value, chunk, mask, key_mask, opened)
    share = result[..., -1].masked_fill(empty, 0.0)
    return result[..., :-1] + share[..., None] * mean, share


def _attend_one(query: Tensor, key: Tensor, value: Tensor, opened: OpenChunk) -> Tensor:
    """One query a row over its chunk so far; in whatever slots, for a sum has no order, and empty ones are masked."""
    key, value = (torch.cat([old.to(new.dtype), new], 2) for old, new in ((opened.key, key), (opened.value, value)))
    return _attend(query, key, value, causal=False)


def _attend_aligned(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chunk: int,
    mask: dict[str, Any],
    key_mask: Tensor | None,
    opened: OpenChunk | None,
) -> Tensor:
    """Rows moved so that the first token opens a chunk; then chunks are items of the batch."""
    alignment = align(key_mask, None, key) if opened is None else behind_open_chunk(opened, key_mask, key, chunk)
    if alignment is None:
        return _attend_in_chunks(query, key, value, chunk, **mask)
    query = alignment.to_aligned(query)
    key = alignment.to_aligned(key, None if opened is None else opened.key)
    value = alignment.to_aligned(value, None if opened is None else opened.value)
    return alignment.from_aligned(_attend_in_chunks(query, key, value, chunk, **mask))


def _attend_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, chunk: int, causal: bool, block_size: int = 1
) -> Tensor:
    batch, _, length, _ = query.shape
    chunk = min(chunk, length)
    query, key, value = (
        F.pad(x, (0, 0, 0, -length % chunk)).unflatten(2, (-1, chunk)).transpose(1, 2).flatten(0, 1)
        for x in (query, key, value)
    )
    output = _attend(F.pad(query, (0, 0, 1, 0)), key, value, causal, block_size)[
        :, :, 1:
    ]  # a first query beside the first key
    return output.unflatten(0, (batch, -(-length // chunk))).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, block_size: int = 1) -> Tensor:
    """Softmax attention of queries with two more entries over keys and, first, the one that stands for the rest.

    The last column of the result is that key's weight, the others are the weighted values of all other keys.
    """
    real = value[..., -1:].detach()
    one, zero = torch.ones_like(real[:, :, :1]), torch.zeros_like(real)
    first_key = F.pad(one, (key.shape[3], 1))
    first_value = F.pad(one, (value.shape[3] - 1, 0))
    keys = torch.cat([first_key, torch.cat([key, zero, (1.0 - real) * _NEVER], -1)], 2)
    values = torch.cat([first_value, torch.cat([value[..., :-1], zero], -1)], 2)
    width = value.shape[3]
    query, keys, values = (F.pad(x, (0, -x.shape[3] % _WIDTHS)) for x in (query, keys, values))
    if block_size == 1:
        return masked_attention(query, keys, values, 1.0, causal=causal)[..., :width]
    every = slice(-1, query.shape[2] - 1)  # the first key, and the query beside it, stand before all blocks
    seen = seen_by_blocks(every, every, 0, block_size, query.device)
    return masked_attention(query, keys, values, 1.0, allowed=seen)[..., :width]
