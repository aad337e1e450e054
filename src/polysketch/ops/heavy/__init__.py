"""Exact weights for the keys of a query's bucket, where all others are sketched."""

from polysketch.ops.heavy.api import heavy_correction
from polysketch.ops.heavy.candidates import sort_keys
from polysketch.ops.heavy.codes import line_codes
from polysketch.ops.heavy.edges import chunk_edges

__all__ = ["chunk_edges", "heavy_correction", "line_codes", "sort_keys"]
