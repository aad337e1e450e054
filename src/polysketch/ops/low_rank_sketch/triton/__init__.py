"""The low-rank sketch on CUDA devices: programs in Triton, and who launches them."""

from polysketch.ops.low_rank_sketch.triton.launcher import backward, forward, why_not

__all__ = ["backward", "forward", "why_not"]
