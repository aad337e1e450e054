"""Causal convolutions on CUDA devices: programs in Triton, and who launches them."""

from polysketch.ops.convolution.triton.launcher import (
    backward,
    forward,
    gradient_of,
    gradient_of_tail,
    output_of,
    why_not,
)

__all__ = ["backward", "forward", "gradient_of", "gradient_of_tail", "output_of", "why_not"]
