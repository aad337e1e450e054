"""Norm and rotation of heads on CUDA devices: programs in Triton, and who launches them."""

from polysketch.ops.rotated_heads.triton.launcher import (
    backward,
    forward,
    given,
    gives_normed,
    gradient_of,
    outputs_of,
    why_not,
)

__all__ = ["backward", "forward", "given", "gives_normed", "gradient_of", "outputs_of", "why_not"]
