"""The definition, in PyTorch's operations."""

import torch
from torch import Tensor

from polysketch.ops.cross_entropy.types import CrossEntropy
from polysketch.targets import NO_TARGET


def cross_entropy_(logits: Tensor, bias: Tensor, targets: Tensor, divisor: Tensor, dtype: torch.dtype) -> CrossEntropy:
    """-log softmax(logits + bias) of targets; arguments as `polysketch.ops.cross_entropy.cross_entropy_`."""
    ignored = targets == NO_TARGET
    index = targets.masked_fill(ignored, 0)[:, None]
    log_probabilities = logits.add_(bias).log_softmax(1)
    losses = log_probabilities.gather(1, index)[:, 0].neg().masked_fill(ignored, 0.0)
    share = divisor.reciprocal().expand(len(index)).masked_fill(ignored, 0.0)[:, None]
    gradient = log_probabilities.exp_().mul_(share).scatter_add_(1, index, -share)
    return CrossEntropy(losses, gradient.to(dtype), gradient.sum(0))
