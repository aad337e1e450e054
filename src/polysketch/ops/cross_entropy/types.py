"""What `cross_entropy_` gives."""

from typing import NamedTuple

from torch import Tensor


class CrossEntropy(NamedTuple):
    """Losses and their gradients.

    Attributes:
        losses: (rows,), nats; 0 without a target.
        logits_gradient: (rows, vocab_size), of the sum of losses over the divisor; 0 without a target.
        bias_gradient: (vocab_size,), its sum over rows.
    """

    losses: Tensor
    logits_gradient: Tensor
    bias_gradient: Tensor
