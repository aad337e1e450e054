"""Cross-entropy of logits together with its gradients, a row at a time."""

from polysketch.ops.cross_entropy.api import CrossEntropy, cross_entropy_, cross_entropy_backend

__all__ = ["CrossEntropy", "cross_entropy_", "cross_entropy_backend"]
