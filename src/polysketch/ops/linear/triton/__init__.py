"""Linear attention on CUDA devices: programs in Triton, and who launches them."""

from polysketch.ops.linear.triton.launcher import backward, forward, why_not

__all__ = ["backward", "forward", "why_not"]
