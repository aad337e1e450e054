"""The features of the learned low-rank polynomial sketch (LLOPS): sums of products of linear maps."""

from polysketch.ops.low_rank_sketch.api import low_rank_sketch, low_rank_sketch_backend

__all__ = ["low_rank_sketch", "low_rank_sketch_backend"]
