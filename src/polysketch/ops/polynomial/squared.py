"""Attention by the square of a polynomial (Reizin, section 4.3): the public functions."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from polysketch.ops.arguments import check_attention_tensors, check_cache_lengths, check_causal_lengths, check_offset
from polysketch.ops.blocks import check_block_size, in_aligned_rows
from polysketch.ops.polynomial import native
from polysketch.ops.polynomial.api import backend_without_triton
from polysketch.ops.polynomial.reference import working_dtype
from polysketch.ops.polynomial.squared_blockwise import blockwise_squared_polynomial_attention
from polysketch.ops.polynomial.squared_reference import reference_squared_polynomial_attention


class SquaredPolynomialBackend(Protocol):
    """What every backend takes: checked tensors and the polynomial; see the reference for their meaning."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        coefficients: Tensor,
        *,
        offset: float,
        first_position: int | None,
        key_mask: Tensor | None,
        block_size: int = 1,
    ) -> Tensor: ...


SQUARED_POLYNOMIAL_BACKENDS: dict[str, SquaredPolynomialBackend] = {
    "reference": reference_squared_polynomial_attention,
    "blockwise": blockwise_squared_polynomial_attention,
    "native": native.native_squared_polynomial_attention,
}


def squared_polynomial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coefficients: Tensor | Sequence[float],
    *,
    offset: float = 1.0,
    causal: bool = False,
    block_size: int | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """o_i = sum_j w_ij v_j / (offset + sum_j w_ij), w_ij = (a_0 + a_1 s + ... + a_D s^D)^2, s = q_i . k_j.

    Reizin, "Fast Algorithms for Attention Mechanism" (2024), section 4.3. No weight is negative, whatever the
    coefficients. The coefficients 0, ..., 0, 1 give `polynomial_attention` of degree 2 D.

    Weights and sums are float32 (float64 for float64 inputs) whatever the input and also under autocast. A float32
    weight overflows where the polynomial exceeds 1.8e19: with all coefficients 1 and layer-normalised vectors of size
    64, whose products reach 64, beyond degree 10. Such a row becomes NaN, never a wrong finite number.

    Args:
        query: (batch, heads, query_length, head_dim), float32, bfloat16, float16 or float64, any strides.
        key: (batch, key_heads, key_length, head_dim); ``heads`` is a multiple of ``key_heads`` (grouped queries).
        value: (batch, key_heads, key_length, value_dim); value_dim may differ from head_dim.
        coefficients: a_0 to a_D, at least two: finite numbers, or a tensor (D + 1,) on the device of the query.
        offset: finite, at least 0.
        causal: query i sees the keys j <= i only; needs equal lengths.
        block_size: tokens of a block, inside which causal attention sees both sides: query i sees the keys of its own
            block and of all blocks before; None for 1. Blocks count from a row's first real token; the last may be
            short.
        key_mask: (batch, key_length) bool, True for a real token.
        backend: "reference", "blockwise", "native" (a program in C++ on a CPU, compiled at its first use: not
            float64), or "auto", which picks the fastest one.

    Returns:
        (batch, heads, query_length, value_dim) in the dtype of ``value``. A query that sees no real key gets zeros.
        Differentiable once in query, key, value and a tensor of coefficients.

    Raises:
        ValueError: shapes, devices, coefficients, offset or backend do not fit, or ``causal`` with unequal lengths.
        TypeError: dtypes that are not floating point or not alike (outside autocast), or a mask that is not bool.
        RuntimeError: the native backend was asked for and cannot run here, with the reason.

    Cost: 2 * query_length * key_length * (head_dim + value_dim + D) operations a head, half of it when causal. The
    blockwise backend holds a few blocks of weights, never the whole matrix.
    """
    check_attention_tensors(query, key, value, key_mask)
    if causal:
        check_causal_lengths(query, key)
    if block_size is not None:
        check_block_size(block_size, causal)
    first_position = 0 if causal else None
    return _attend(query, key, value, coefficients, offset, first_position, key_mask, backend, block_size)


def squared_polynomial_attention_with_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coefficients: Tensor | Sequence[float],
    *,
    offset: float = 1.0,
    block_size: int | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal `squared_polynomial_attention` of the last queries of a sequence over all of its keys, for decoding.

    Query i of n stands at position m - n + i of the m keys and sees the keys up to and including its own position;
    the caller has appended the new keys and values to the cache.

    Args:
        query: (batch, heads, n, head_dim), n <= m.
        key: (batch, key_heads, m, head_dim).
        value: (batch, key_heads, m, value_dim).
        coefficients: a_0 to a_D.
        offset: finite, at least 0.
        block_size: as in `squared_polynomial_attention`; a block begins with the first of the queries.
        key_mask: (batch, m) bool, True for a real token.
        backend: as in `squared_polynomial_attention`.

    Returns:
        (batch, heads, n, value_dim) in the dtype of ``value``. A query that sees no real key gets zeros.

    Raises:
        ValueError: more queries than keys, or as in `squared_polynomial_attention`.
        TypeError, RuntimeError: as in `squared_polynomial_attention`.
    """
    check_attention_tensors(query, key, value, key_mask)
    check_cache_lengths(query, key)
    if block_size is not None:
        check_block_size(block_size, True)
    first_position = key.shape[2] - query.shape[2]
    return _attend(query, key, value, coefficients, offset, first_position, key_mask, backend, block_size)


def check_coefficients(coefficients: Sequence[float]) -> None:
    """Refuse what is no polynomial of degree one or more.

    Raises:
        TypeError: a coefficient that is not a number.
        ValueError: fewer than two coefficients, or one that is not finite.
    """
    for coefficient in coefficients:
        if isinstance(coefficient, bool) or not isinstance(coefficient, int | float):
            raise TypeError(f"coefficients must be numbers, got {coefficient!r}")
    if len(coefficients) < 2 or not all(map(math.isfinite, coefficients)):
        raise ValueError(
            f"coefficients must be at least two finite numbers, the constant first, got {list(coefficients)}"
        )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coefficients: Tensor | Sequence[float],
    offset: float,
    first_position: int | None,
    key_mask: Tensor | None,
    backend: str,
    block_size: int | None,
) -> Tensor:
    check_offset(offset)
    terms = _as_tensor(coefficients, query, working_dtype(query, key, value))
    attend = SQUARED_POLYNOMIAL_BACKENDS[_picked(query, key, value, backend)]
    if block_size is None or block_size == 1:
        return attend(query, key, value, terms, offset=offset, first_position=first_position, key_mask=key_mask)

    def by_blocks(query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None) -> Tensor:
        options = {"offset": offset, "first_position": first_position, "block_size": block_size}
        return attend(query, key, value, terms, **options, key_mask=key_mask)  # type: ignore[arg-type]

    return in_aligned_rows(by_blocks, query, key, value, key_mask)


def _picked(query: Tensor, key: Tensor, value: Tensor, backend: str) -> str:
    if backend == "auto":
        return backend_without_triton(query, key, value)
    if backend not in SQUARED_POLYNOMIAL_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(['auto', *SQUARED_POLYNOMIAL_BACKENDS])}, got {backend!r}")
    reason = native.why_not(query, key, value) if backend == "native" else None
    if reason is not None:
        raise RuntimeError(reason)
    return backend


def _as_tensor(coefficients: Tensor | Sequence[float], query: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(coefficients, Tensor):
        check_coefficients(coefficients)
        return torch.tensor(coefficients, dtype=dtype, device=query.device)
    if coefficients.dim() != 1 or coefficients.shape[0] < 2 or not coefficients.is_floating_point():
        raise ValueError(
            "coefficients must be a floating tensor (D + 1,) of at least two, got "
            f"{coefficients.dtype} of {tuple(coefficients.shape)}"
        )
    if coefficients.device != query.device:
        raise ValueError(f"coefficients must be on the device of query, {query.device}, got {coefficients.device}")
    return coefficients
