"""Attention in less than quadratic time: sketched polynomials, exact near the diagonal, constant memory in generation."""

__version__ = "0.1.0"
