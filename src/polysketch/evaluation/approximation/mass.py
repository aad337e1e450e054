"""How much attention goes beyond a window."""

import torch
from torch import Tensor

__all__ = ["mass_beyond_window"]


def mass_beyond_window(weights: Tensor, window: int, *, causal: bool = True) -> Tensor:
    """The mean share of a query's attention that falls on keys `window` or more tokens away.

    A sliding window of that many tokens gives exactly this share up. The mean is over queries that have such keys:
    with `causal`, those from position `window` on. Weights of either sign count by their absolute value, and a query
    without any weight has a share of zero.

    Args:
        weights: (..., length, length), normalised or not, of `mechanism_weights` for instance; with `causal` what is
            above the diagonal is not looked at.
        window: tokens, itself included: at 1, all but the own token is beyond.
        causal: only earlier keys are beyond, else later ones too.

    Returns:
        (...,) float64 in [0, 1].

    Raises:
        ValueError: a window below 1, or so long that no query has a key beyond it.
    """
    length = weights.shape[-1]
    if not 1 <= window < length:
        raise ValueError(f"expected a window from 1 to {length - 1} for {length} tokens, found {window}")
    positions = torch.arange(length, device=weights.device)
    distance = positions[:, None] - positions
    beyond = distance >= window if causal else distance.abs() >= window
    masses = weights.double().abs()
    masses = masses.tril() if causal else masses
    shares = (masses * beyond).sum(-1) / masses.sum(-1).clamp(min=torch.finfo(torch.float64).tiny)
    return shares[..., beyond.any(-1)].mean(-1)
