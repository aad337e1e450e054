"""From logits to the next token: pure functions, one idea each, and the object that composes them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampler", "draw", "keep_top_k", "keep_top_p", "require_finite"]

EXCLUDED = -math.inf
"""The logit of a token that must not be drawn."""


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Return `logits` with all but the k largest of each row set to -inf.

    Exactly k remain, also among equal logits; all of them where k is the vocabulary or more.

    Args:
        logits: (batch, vocab), floating.
        k: at least 1.
    """
    if k >= logits.shape[-1]:
        return logits
    values, indices = logits.topk(k, dim=-1)
    return torch.full_like(logits, EXCLUDED).scatter(-1, indices, values)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Return `logits` with all but the most probable tokens of each row set to -inf (nucleus sampling).

    Kept is the smallest set of most probable tokens whose probabilities sum to at least p: the token that crosses p is
    in it, so that one token always remains. Source: Holtzman et al. 2020, section 3.1.

    Args:
        logits: (batch, vocab), floating.
        p: above 0, at most 1.
    """
    ordered, indices = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    kept = ordered.masked_fill(mass_before >= p, EXCLUDED)
    return torch.empty_like(logits).scatter(-1, indices, kept)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Return one token a row, drawn from softmax(logits) by inverting its cumulative distribution.

    A function of its arguments alone: the same row and the same uniform give the same token in any batch.

    Args:
        logits: (batch, vocab), float64, at least one finite value in every row.
        uniforms: (batch,), float64 in [0, 1).

    Returns:
        int64 (batch,).

    Raises:
        ValueError: other shapes.
    """
    if logits.dim() != 2 or uniforms.shape != logits.shape[:1]:
        shapes = f"{tuple(logits.shape)} and {tuple(uniforms.shape)}"
        raise ValueError(f"expected logits (batch, vocab) and uniforms (batch,), found {shapes}")
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    # Below the total even after rounding, and `right` skips tokens of probability zero.
    thresholds = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)


def require_finite(logits: Tensor) -> None:
    """Refuse logits of a model that is damaged.

    Raises:
        ValueError: a logit is NaN or infinite.
    """
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("expected finite logits, found NaN or infinity: the model's weights are probably damaged")


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen: temperature first, then top-k, then top-p.

    Attributes:
        temperature: logits are divided by it; 1 samples the model's own distribution, 0 takes the most probable token.
        top_k: draw among this many most probable tokens only. Default: all.
        top_p: draw among the most probable tokens that hold this share of the probability. Default: all.

    Raises:
        ValueError: a temperature below 0 or not finite, top_k below 1, top_p outside (0, 1].
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        """Refuse settings that no distribution corresponds to."""
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"expected a finite temperature of at least 0, found {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"expected top_k of at least 1, found {self.top_k}; leave it out to keep all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"expected top_p above 0 and at most 1, found {self.top_p}; leave it out to keep all")

    def choose(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Return the next token of every row, int64 (batch,).

        Args:
            logits: (batch, vocab), floating, finite.
            uniforms: (batch,), float64 in [0, 1), one random number a row; not looked at when temperature is 0.

        Raises:
            ValueError: a logit is NaN or infinite.
        """
        require_finite(logits)
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        # Differences to the largest: a temperature next to 0 then gives 0 and -inf, never inf - inf.
        relative = logits.double() - logits.double().amax(dim=-1, keepdim=True)
        return draw(self._restrict(relative / self.temperature), uniforms)

    def _restrict(self, logits: Tensor) -> Tensor:
        """Exclude what top_k and top_p exclude."""
        if self.top_k is not None:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p is not None:
            logits = keep_top_p(logits, self.top_p)
        return logits
