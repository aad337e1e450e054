"""Softmax attention over PyTorch's scaled_dot_product_attention: the baseline of every other mechanism."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.arguments import check_attention_tensors, check_cache_lengths, check_causal_lengths
from polysketch.ops.blocks import check_block_size, in_aligned_rows, seen_by_blocks
from polysketch.ops.packed import PackedDocuments, by_documents

_MASKED_ROWS = 1024  # rows of one boolean mask: memory grows with the key length, not with its square


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    block_size: int | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | PackedDocuments | None = None,
) -> Tensor:
    """Exact softmax attention: o_i = sum_j softmax_j(scale * q_i . k_j) v_j.

    Runs ``torch.nn.functional.scaled_dot_product_attention`` so that its fused kernels are used: without a mask
    always, with a ``key_mask`` wherever the fused kernel takes one. Under autocast PyTorch's own rule for that
    function holds (it computes in the autocast dtype).

    Args:
        query: (batch, heads, query_length, head_dim).
        key: (batch, key_heads, key_length, head_dim); ``heads`` is a multiple of ``key_heads`` (grouped queries).
        value: (batch, key_heads, key_length, value_dim); value_dim may differ from head_dim.
        causal: query i sees the keys j <= i only; needs equal lengths.
        block_size: tokens of a block, inside which causal attention sees both sides: query i sees the keys of its own
            block and of all blocks before; None for 1. Blocks count from a row's first real token; the last may be
            short;
            1,024 rows at a time have an explicit mask.
        key_mask: (batch, key_length) bool, True for a real token; masked keys get no weight.
        scale: factor on q . k; 1 / sqrt(head_dim) when None.
        cu_seqlens: (documents + 1,) int32 offsets, or `ops.PackedDocuments`: the batch is one row of documents, each
            attended to by itself. Not beside a `key_mask`.

    Returns:
        (batch, heads, query_length, value_dim). A query that sees no real key gets zeros.

    Raises:
        ValueError: shapes or devices disagree, or ``causal`` with different lengths.
        TypeError: dtypes that are not floating point or not alike, or a mask that is not bool.

    Cost: 2 * query_length * key_length * (head_dim + value_dim) operations a head, half of it when causal.
    """
    check_attention_tensors(query, key, value, key_mask)
    if block_size is not None:
        check_block_size(block_size, causal)
    if cu_seqlens is not None:
        attend = partial(softmax_attention, causal=causal, block_size=block_size, scale=scale)
        return by_documents(
            attend, (query, key, value), cu_seqlens, causal=causal, block_size=block_size, key_mask=key_mask
        )
    if causal:
        check_causal_lengths(query, key)
        return _causal_attention(query, key, value, key_mask, scale, block_size or 1)
    allowed = None if key_mask is None else key_mask[:, None, None, :]
    return masked_attention(query, key, value, scale, allowed=allowed)


def softmax_attention_with_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal softmax attention of the last queries of a sequence over all of its keys, for decoding with a cache.

    Query i of n stands at position m - n + i of the m keys and sees the keys up to and including its own position;
    the caller has appended the new keys and values to the cache. With n = m this is ``softmax_attention`` with
    ``causal=True``.

    Args:
        query: (batch, heads, n, head_dim), n <= m.
        key: (batch, key_heads, m, head_dim).
        value: (batch, key_heads, m, value_dim).
        block_size: as in ``softmax_attention``; a block begins with the first of the queries.
        key_mask: (batch, m) bool, True for a real token.
        scale: factor on q . k; 1 / sqrt(head_dim) when None.

    Returns:
        (batch, heads, n, value_dim). A query that sees no real key gets zeros.

    Raises:
        ValueError: more queries than keys, or shapes or devices that disagree.
        TypeError: dtypes that are not floating point or not alike, or a mask that is not bool.
    """
    check_attention_tensors(query, key, value, key_mask)
    check_cache_lengths(query, key)
    if block_size is not None:
        check_block_size(block_size, True)
    return _causal_attention(query, key, value, key_mask, scale, block_size or 1)


def _causal_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float | None, block_size: int
) -> Tensor:
    """Causal attention of queries at the last positions of the keys, by the cheapest form that fits."""
    if query.shape[2] == 1:  # a block of its own, or the last and short
        allowed = None if key_mask is None else key_mask[:, None, None, :]
        return masked_attention(query, key, value, scale, allowed=allowed)
    if key_mask is None and query.shape[2] == key.shape[2] and block_size == 1:
        return masked_attention(query, key, value, scale, causal=True)
    if block_size == 1:
        return _attend_row_blocks(query, key, value, key_mask=key_mask, scale=scale, block_size=1)
    attend = partial(_attend_row_blocks, scale=scale, block_size=block_size)
    return in_aligned_rows(attend, query, key, value, key_mask)


def _attend_row_blocks(
    query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None, scale: float | None, block_size: int
) -> Tensor:
    """Causal attention by an explicit mask, some rows at a time and over the keys those rows can see."""
    first_position = key.shape[2] - query.shape[2]
    outputs = []
    for start in range(0, query.shape[2], _MASKED_ROWS):
        rows = query[:, :, start : start + _MASKED_ROWS]
        stop = start + rows.shape[2]
        visible = min(first_position + -(-stop // block_size) * block_size, key.shape[2])
        places = slice(start, stop), slice(0, visible)
        allowed = seen_by_blocks(*places, first_position, block_size, query.device)[None, None]
        if key_mask is not None:
            allowed = allowed & key_mask[:, None, None, :visible]
        outputs.append(masked_attention(rows, key[:, :, :visible], value[:, :, :visible], scale, allowed=allowed))
    return torch.cat(outputs, dim=2)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    *,
    allowed: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """scaled_dot_product_attention with any mask and value width, grouped queries; zeros for rows that see nothing."""
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if scale <= 0:  # PyTorch's causal kernel gives NaN for such a factor: infinity times it hides no key
        query, scale = query * scale, 1.0
    value_dim = value.shape[3]
    query, key, value = _equal_widths(query, key, value)
    key, value, grouped = _shared_heads(query, key, value)
    blind = None
    if allowed is not None:
        # A row without a key would be 0 / 0 in some kernels, and so would its gradient: let it see all, then drop it.
        blind = ~allowed.any(dim=-1, keepdim=True)
        allowed = allowed | blind
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    output = output if blind is None else output.masked_fill(blind, 0.0)
    return output[..., :value_dim]


def _equal_widths(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the narrower of key and value with zeros: the fused CPU kernel takes one width, its fallback is n x n."""
    missing = key.shape[3] - value.shape[3]
    if missing > 0:
        return query, key, F.pad(value, (0, missing))
    if missing < 0:
        return F.pad(query, (0, -missing)), F.pad(key, (0, -missing)), value
    return query, key, value


def _shared_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Key and value for grouped queries, and whether the kernel is to share them itself."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value, False
    if query.device.type == "cpu" or query.dtype in (torch.float16, torch.bfloat16):
        return key, value, True
    # On CUDA only the half-precision kernel shares heads; float32 would fall back to an n x n matrix.
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1), False
