"""The mean loss as Trainer wants it: over the labels of this call, or of all the calls of a step."""

import torch
from torch import Tensor

from polysketch.targets import NO_TARGET


def averaged(losses: Tensor, targets: Tensor, num_items: Tensor | int | None) -> Tensor:
    """The mean loss of the tokens that have something to predict; a scalar.

    Args:
        losses: of each token, 0 where nothing is to be predicted.
        targets: of the same tokens, int64; -100 where nothing is to be predicted.
        num_items: divide the sum by this number instead of theirs.
    """
    return losses.sum() / divisor(targets, num_items)


def divisor(targets: Tensor, num_items: Tensor | int | None) -> Tensor | int:
    """What summed losses of such tokens are divided by: `num_items`, or the tokens that have something to predict."""
    if num_items is None:
        return (targets != NO_TARGET).sum().clamp(min=1)
    return num_items.to(targets.device) if isinstance(num_items, Tensor) else num_items


def check_labels(labels: Tensor, shape: torch.Size) -> None:
    """Refuse labels of another shape than (batch, length).

    Raises:
        ValueError: what was expected and what came.
    """
    if labels.shape != shape:
        raise ValueError(f"expected labels of shape {tuple(shape)}, got {tuple(labels.shape)}")
