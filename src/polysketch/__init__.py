"""Attention in less than quadratic time: sketched polynomials, exact near the diagonal, a state of constant size."""

__version__ = "0.1.0"
