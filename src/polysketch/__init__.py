"""Attention in less than quadratic time: polynomial sketches, exact near the diagonal, constant memory when generating."""

__version__ = "0.1.0"
