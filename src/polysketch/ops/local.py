"""Attention to nearby tokens only, in linear time: aligned chunks of exact polynomials."""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch.ops.arguments import check_at_least_one, check_attention_tensors, check_causal_lengths, check_devices
from polysketch.ops.blocks import check_block_size, check_fitting_blocks
from polysketch.ops.linear.alignment import Alignment, align, leading_padding
from polysketch.ops.packed import PackedDocuments, by_documents
from polysketch.ops.polynomial import polynomial_attention


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

    def check(self, key: Tensor, value: Tensor, chunk: int) -> None:
        """Refuse an open chunk of other rows, heads or widths than the tokens that come behind it.

        Raises:
            ValueError: naming what was expected and what is here.
            TypeError: a position that is not int64.
        """
        expected = {
            "key": (*key.shape[:2], chunk, key.shape[3]),
            "value": (*value.shape[:2], chunk, value.shape[3]),
            "position": key.shape[:1],
        }
        for name, shape in expected.items():
            found = getattr(self, name)
            if tuple(found.shape) != tuple(shape):
                raise ValueError(f"opened.{name} must be of the shape {tuple(shape)}, got {tuple(found.shape)}")
        if self.position.dtype != torch.int64:
            raise TypeError(f"opened.position must be int64, got {self.position.dtype}")
        check_devices(key=key, value=value, opened_key=self.key, opened_value=self.value)
        in_memory = self.position.is_cpu and not torch.compiler.is_compiling()
        if in_memory and bool((self.position < 0).any()):
            raise ValueError(f"opened.position counts tokens, got {self.position.tolist()[:16]}")


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    degree: int = 4,
    chunk: int = 1024,
    offset: float = 1.0,
    causal: bool = False,
    block_size: int | None = None,
    key_mask: Tensor | None = None,
    opened: OpenChunk | None = None,
    cu_seqlens: Tensor | PackedDocuments | None = None,
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
        block_size: tokens of a block, inside which causal attention sees both sides as far as the chunk reaches; None
            for 1. It divides the chunk or is a multiple of it.
        key_mask: (batch, length) bool, True for a real token.
        opened: tokens of the same sequences from before the first of these, in whose chunk these go on; causal only.
        cu_seqlens: (documents + 1,) int32 offsets, or `ops.PackedDocuments`: the batch is one row of documents, each
            attended to by itself. Not beside a `key_mask` or `opened`.

    Returns:
        (batch, heads, length, value_dim) in the dtype of value; zeros where padding precedes a row.

    Raises:
        ValueError: a chunk below 1, `opened` without `causal` or of another shape, or as in `polynomial_attention`.
        TypeError: a chunk that is no integer, or as in `polynomial_attention`.

    Cost: 2 * length * chunk * (head_dim + value_dim) operations a head, half of it when causal; memory linear in the
    length. Queries that follow an open chunk cost as much as those of the whole chunk.
    """
    check_attention_tensors(query, key, value, key_mask)
    check_causal_lengths(query, key)
    check_at_least_one(chunk=chunk)
    if opened is not None:
        if not causal:
            raise ValueError("an open chunk goes on with later tokens: it needs causal=True, got causal=False")
        opened.check(key, value, chunk)
    options = {"degree": degree, "offset": offset, **mask_in_chunks(chunk, causal, block_size)}
    if cu_seqlens is not None:
        if opened is not None:
            raise ValueError("documents of cu_seqlens begin with a chunk of their own: opened cannot be given beside")
        attend = partial(
            local_attention, degree=degree, chunk=chunk, offset=offset, causal=causal, block_size=block_size
        )
        return by_documents(
            attend, (query, key, value), cu_seqlens, causal=causal, block_size=block_size, key_mask=key_mask
        )
    alignment = align(key_mask, None, key) if opened is None else behind_open_chunk(opened, key_mask, key, chunk)
    if key_mask is not None:
        key, value = (x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (key, value))
    if alignment is None:
        return _attend_in_chunks(query, key, value, chunk, options)
    query = alignment.to_aligned(query)
    key = alignment.to_aligned(key, None if opened is None else opened.key)
    value = alignment.to_aligned(value, None if opened is None else opened.value)
    return alignment.from_aligned(_attend_in_chunks(query, key, value, chunk, options))


def mask_in_chunks(chunk: int, causal: bool, block_size: int | None) -> dict[str, Any]:
    """What `causal` and `block_size` mean to a call on chunks: one of whole blocks shows all of itself.

    Raises:
        TypeError, ValueError: as `check_block_size` and `check_fitting_blocks`.
    """
    if block_size is None:
        return {"causal": causal}
    check_block_size(block_size, causal)
    check_fitting_blocks(block_size, chunk=chunk)
    return {"causal": False} if block_size >= chunk else {"causal": True, "block_size": block_size}


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
