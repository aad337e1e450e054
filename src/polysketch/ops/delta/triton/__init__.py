"""The delta rule on CUDA devices: programs in Triton, and who launches them."""

from polysketch.ops.delta.triton.launcher import errors, errors_in_reverse, why_not

__all__ = ["errors", "errors_in_reverse", "why_not"]
