"""The middle of a gated linear unit on CUDA devices: programs in Triton, and who launches them."""

from polysketch.ops.gated_gelu.triton.launcher import backward, forward, gradient_of, output_of, why_not

__all__ = ["backward", "forward", "gradient_of", "output_of", "why_not"]
