"""Norm and sketch of heads on CUDA devices: programs in Triton, and who launches them."""

from polysketch.ops.head_sketch.triton.launcher import backward, forward, gradient_of, outputs_of, why_not

__all__ = ["backward", "forward", "gradient_of", "outputs_of", "why_not"]
