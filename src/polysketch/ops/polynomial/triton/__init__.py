"""Exact polynomial attention on CUDA devices: programs in Triton, and who launches them."""

from polysketch.ops.polynomial.triton.launcher import triton_polynomial_attention, why_not

__all__ = ["triton_polynomial_attention", "why_not"]
