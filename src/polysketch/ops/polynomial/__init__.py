"""Exact polynomial attention: powers, or squares of polynomials, of q . k; never an n x n matrix in memory."""

from polysketch.ops.polynomial.api import (
    POLYNOMIAL_BACKENDS,
    polynomial_attention,
    polynomial_attention_backend,
    polynomial_attention_with_cache,
)
from polysketch.ops.polynomial.squared import (
    SQUARED_POLYNOMIAL_BACKENDS,
    check_coefficients,
    squared_polynomial_attention,
    squared_polynomial_attention_with_cache,
)

__all__ = [
    "POLYNOMIAL_BACKENDS",
    "SQUARED_POLYNOMIAL_BACKENDS",
    "check_coefficients",
    "polynomial_attention",
    "polynomial_attention_backend",
    "polynomial_attention_with_cache",
    "squared_polynomial_attention",
    "squared_polynomial_attention_with_cache",
]
