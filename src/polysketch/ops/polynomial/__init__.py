"""Exact polynomial attention: weights (scale * q . k)^degree, never an n x n matrix in memory."""

from polysketch.ops.polynomial.api import (
    POLYNOMIAL_BACKENDS,
    polynomial_attention,
    polynomial_attention_backend,
    polynomial_attention_with_cache,
)

__all__ = [
    "POLYNOMIAL_BACKENDS",
    "polynomial_attention",
    "polynomial_attention_backend",
    "polynomial_attention_with_cache",
]
