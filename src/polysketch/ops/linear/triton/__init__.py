"""Linear attention on CUDA devices: programs in Triton, and who launches them."""

from polysketch.ops.linear.triton.launcher import backward, forward, pieces, why_not

__all__ = ["backward", "forward", "pieces", "why_not"]
