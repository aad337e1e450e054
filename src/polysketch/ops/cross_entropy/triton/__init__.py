"""Cross-entropy and its gradients on CUDA devices: programs in Triton, and who launches them."""

from polysketch.ops.cross_entropy.triton.launcher import cross_entropy, why_not

__all__ = ["cross_entropy", "why_not"]
