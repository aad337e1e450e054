"""Exact polynomial attention (PolySketchFormer, section 2.1): the public functions and the choice of backend."""

import math
from functools import partial
from operator import index
from typing import Protocol

import torch
from torch import Tensor

from polysketch.ops.arguments import (
    check_at_least_one,
    check_attention_tensors,
    check_cache_lengths,
    check_causal_lengths,
    check_offset,
)
from polysketch.ops.blocks import check_block_size, in_aligned_rows
from polysketch.ops.packed import PackedDocuments, by_documents
from polysketch.ops.polynomial import native, triton
from polysketch.ops.polynomial.blockwise import blockwise_polynomial_attention
from polysketch.ops.polynomial.reference import reference_polynomial_attention
from polysketch.ops.polynomial.self_check import programs_agree
from polysketch.ops.triton.availability import AUTO_DEVICES


class PolynomialBackend(Protocol):
    """What every backend takes: checked tensors and the polynomial; see the reference for their meaning."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        degree: int,
        scale: float,
        offset: float,
        first_position: int | None,
        key_mask: Tensor | None,
        block_size: int = 1,
    ) -> Tensor: ...


POLYNOMIAL_BACKENDS: dict[str, PolynomialBackend] = {
    "reference": reference_polynomial_attention,
    "blockwise": blockwise_polynomial_attention,
    "native": native.native_polynomial_attention,
    "triton": triton.triton_polynomial_attention,
}

# The native program works on 32 queries at a time, however few there are.
_NATIVE_QUERIES = 16

# Below both, the reference is faster than blocks, measured on two CPU cores with heads of 64.
_REFERENCE_KEYS = 64
_REFERENCE_WEIGHTS = 65_536


def polynomial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    degree: int = 4,
    scale: float = 1.0,
    offset: float = 1.0,
    causal: bool = False,
    block_size: int | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | PackedDocuments | None = None,
    backend: str = "auto",
) -> Tensor:
    """Exact polynomial attention: o_i = sum_j w_ij v_j / (offset + sum_j w_ij), w_ij = (scale * q_i . k_j)^degree.

    PolySketchFormer, section 2.1. The paper's queries and keys are layer-normalised, its scale and offset are 1.
    ``offset`` is used as given: a scale s multiplies every weight by s^degree, so the function of scale 1 and
    offset c is also that of scale s and offset c * s^degree.

    Weights and sums are float32 (float64 for float64 inputs) whatever the input and also under autocast; float16
    inputs are safe for that reason. A float32 weight overflows where |scale * q . k| exceeds 2^(128 / degree): 4e9 at
    degree 4, 65,536 at 8, 256 at 16 (layer-normalised vectors of size 64 reach 64). Such a row becomes NaN, never a
    wrong finite number; a smaller ``scale`` with the ``offset`` to match avoids it. A row whose weights are all zero
    gives zeros, also with offset 0.

    Args:
        query: (batch, heads, query_length, head_dim), float32, bfloat16, float16 or float64, any strides.
        key: (batch, key_heads, key_length, head_dim); ``heads`` is a multiple of ``key_heads`` (grouped queries).
        value: (batch, key_heads, key_length, value_dim); value_dim may differ from head_dim.
        degree: even, at least 2.
        scale: finite factor on q . k.
        offset: finite, at least 0.
        causal: query i sees the keys j <= i only; needs equal lengths.
        block_size: tokens of a block, inside which causal attention sees both sides: query i sees the keys of its own
            block and of all blocks before; None for 1. Blocks count from a row's first real token; the last may be
            short.
        key_mask: (batch, key_length) bool, True for a real token.
        cu_seqlens: (documents + 1,) int32 offsets, or `ops.PackedDocuments`: the batch is one row of documents, each
            attended to by itself. Not beside a `key_mask`.
        backend: "reference", "blockwise", "native" (a program in C++ on a CPU, compiled at its first use: not
            float64), "triton" (programs for CUDA devices: not float64, vectors of up to 128, no blocks), or "auto";
            ``polynomial_attention_backend`` tells what "auto" picks.

    Returns:
        (batch, heads, query_length, value_dim) in the dtype of ``value``. A query that sees no real key gets zeros.
        Differentiable once in query, key and value.

    Raises:
        ValueError: shapes, devices, degree, scale, offset or backend do not fit, or ``causal`` with unequal lengths.
        TypeError: dtypes that are not floating point or not alike (outside autocast), or a mask that is not bool.
        RuntimeError: the native or the triton backend was asked for and cannot run here, with the reason.

    Cost: 2 * query_length * key_length * (head_dim + value_dim) operations a head, half of it when causal. The
    blockwise backend holds a few blocks of weights, never the whole matrix; the programs hold none. The native one
    copies keys and values of a key head, 4 key_length (head_dim + value_dim) bytes for each thread, and backward as
    much again for sums.
    """
    check_attention_tensors(query, key, value, key_mask)
    if causal:
        check_causal_lengths(query, key)
    if block_size is not None:
        check_block_size(block_size, causal)
    if cu_seqlens is not None:
        attend = partial(
            polynomial_attention,
            degree=degree,
            scale=scale,
            offset=offset,
            causal=causal,
            block_size=block_size,
            backend=backend,
        )
        return by_documents(
            attend, (query, key, value), cu_seqlens, causal=causal, block_size=block_size, key_mask=key_mask
        )
    first_position = 0 if causal else None
    return _attend(query, key, value, degree, scale, offset, first_position, key_mask, backend, block_size)


def polynomial_attention_with_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    degree: int = 4,
    scale: float = 1.0,
    offset: float = 1.0,
    block_size: int | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal polynomial attention of the last queries of a sequence over all of its keys, for decoding with a cache.

    Query i of n stands at position m - n + i of the m keys and sees the keys up to and including its own position;
    the caller has appended the new keys and values to the cache. With n = m this is ``polynomial_attention`` with
    ``causal=True``.

    Args:
        query: (batch, heads, n, head_dim), n <= m.
        key: (batch, key_heads, m, head_dim).
        value: (batch, key_heads, m, value_dim).
        degree: even, at least 2.
        scale: finite factor on q . k.
        offset: finite, at least 0, used as given.
        block_size: as in ``polynomial_attention``; a block begins with the first of the queries.
        key_mask: (batch, m) bool, True for a real token.
        backend: as in ``polynomial_attention``.

    Returns:
        (batch, heads, n, value_dim) in the dtype of ``value``. A query that sees no real key gets zeros.

    Raises:
        ValueError: more queries than keys, or as in ``polynomial_attention``.
        TypeError, RuntimeError: as in ``polynomial_attention``.
    """
    check_attention_tensors(query, key, value, key_mask)
    check_cache_lengths(query, key)
    if block_size is not None:
        check_block_size(block_size, True)
    first_position = key.shape[2] - query.shape[2]
    return _attend(query, key, value, degree, scale, offset, first_position, key_mask, backend, block_size)


def polynomial_attention_backend(
    query: Tensor, key: Tensor, value: Tensor | None = None, *, backend: str = "auto"
) -> str:
    """Name of the backend that ``polynomial_attention`` runs for these tensors, programs that disagree left aside.

    "auto" is "triton" on CUDA devices, where its programs take such tensors, and "native" on a CPU from 16 queries on,
    for float32, bfloat16 and float16, where there are programs or a compiler, and no graph is exported. Elsewhere it is
    "blockwise", except for a few short sequences, where one product is faster than a loop of one block. Degrees above
    60 are not "native" either. Whether the programs disagreed with
    "blockwise" at their first call (`ops.triton.self_check`) depends on options that are not known here: "triton" is
    the answer then too, and the call runs "blockwise".

    Args:
        query, key, value: as in ``polynomial_attention``; a value that is not given is like the key.
        backend: "auto" or a name in ``POLYNOMIAL_BACKENDS``.

    Raises:
        ValueError: ``backend`` is not one of "auto" and the names in ``POLYNOMIAL_BACKENDS``; or tensors that
            ``polynomial_attention`` would refuse.
        RuntimeError: "native" or "triton" was asked for and cannot run here, with the reason.
    """
    value = key if value is None else value
    check_attention_tensors(query, key, value, None)
    if backend == "auto":
        if query.device.type in AUTO_DEVICES and triton.why_not(query, key, value) is None:
            return "triton"
        return backend_without_triton(query, key, value)
    if backend not in POLYNOMIAL_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(['auto', *POLYNOMIAL_BACKENDS])}, got {backend!r}")
    reason = _WHY_NOT[backend](query, key, value) if backend in _WHY_NOT else None
    if reason is not None:
        raise RuntimeError(reason)
    return backend


_WHY_NOT = {"native": native.why_not, "triton": triton.why_not}


def backend_without_triton(query: Tensor, key: Tensor, value: Tensor) -> str:
    """The fastest one of the others. A graph that is exported is for other machines: in PyTorch's own operations."""
    many = query.shape[2] >= _NATIVE_QUERIES
    if many and not torch.compiler.is_exporting() and native.why_not(query, key, value) is None:
        return "native"
    return plain_backend(query, key)


def plain_backend(query: Tensor, key: Tensor) -> str:
    """The faster one of the two backends in plain PyTorch, "reference" and "blockwise"."""
    weights = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    small = key.shape[2] <= _REFERENCE_KEYS and weights <= _REFERENCE_WEIGHTS
    return "reference" if small else "blockwise"


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    degree: int,
    scale: float,
    offset: float,
    first_position: int | None,
    key_mask: Tensor | None,
    backend: str,
    block_size: int | None,
) -> Tensor:
    _check_polynomial(degree, scale, offset)
    degree = index(degree)  # torch.compile(dynamic=True) makes it a symbol, by which its powers have no gradient
    picked = polynomial_attention_backend(query, key, value, backend=backend)
    if picked == "native" and degree > native.LARGEST_DEGREE:
        if backend == "native":
            raise RuntimeError(f"the native backend takes degrees of up to {native.LARGEST_DEGREE}, got {degree}")
        picked = plain_backend(query, key)
    options = {"degree": degree, "scale": scale, "offset": offset, "first_position": first_position}
    if block_size is not None and block_size > 1:
        picked = "blockwise" if backend == "auto" and picked == "triton" else picked
        attend = partial(POLYNOMIAL_BACKENDS[picked], **options, block_size=block_size)  # type: ignore[arg-type]
        return in_aligned_rows(attend, query, key, value, key_mask)
    if backend == "auto" and picked == "triton":
        causal, masked = first_position is not None, key_mask is not None
        if not programs_agree(polynomial_attention, query, key, value, degree=degree, causal=causal, masked=masked):
            picked = "blockwise"
    return POLYNOMIAL_BACKENDS[picked](query, key, value, **options, key_mask=key_mask)  # type: ignore[arg-type]


def _check_polynomial(degree: int, scale: float, offset: float) -> None:
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 2 or degree % 2 != 0:
        raise ValueError(f"degree must be an even integer, 2 or more, so that no weight is negative, got {degree!r}")
    check_at_least_one(degree=degree)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale!r}")
    check_offset(offset)
