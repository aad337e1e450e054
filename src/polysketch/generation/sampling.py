"""From logits to the next token: pure functions, one idea each, and the object that composes them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampler", "draw", "keep_top_k", "keep_top_p", "penalize_repetition", "require_finite", "tokens_seen"]

EXCLUDED = -math.inf
"""The logit of a token that must not be drawn."""

LEAST_PENALTY, MOST_PENALTY = 0.01, 100.0
"""Beyond these a logit loses all meaning, and soon its number too."""


def tokens_seen(texts: Sequence[Sequence[int]], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return which tokens stand in each text: bool (texts, vocab_size).

    Args:
        texts: token ids, each below `vocab_size`.
        vocab_size: of the model.
        device: of the result.

    Raises:
        ValueError: an id that the vocabulary does not have.
    """
    for text in texts:
        if len(text) and not 0 <= min(text) <= max(text) < vocab_size:
            raise ValueError(f"expected ids from 0 to {vocab_size - 1}, found {min(text)} to {max(text)}")
    seen = torch.zeros(len(texts), vocab_size, dtype=torch.bool)
    for row, text in zip(seen, texts, strict=True):
        row[torch.tensor(text, dtype=torch.int64)] = True
    return seen.to(device)


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return `logits` with those of the tokens seen made smaller: divided by the penalty, multiplied if negative.

    Source: Keskar et al. 2019 (CTRL), section 4.1.

    Args:
        logits: (batch, vocab), floating.
        seen: bool (batch, vocab), as of `tokens_seen`.
        penalty: 1 changes nothing; below 1 repetition is favoured.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


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
    """How the next token is chosen: the penalty of repetition first, then temperature, then top-k, then top-p.

    Attributes:
        temperature: logits are divided by it; 1 samples the model's own distribution, 0 takes the most probable token.
        top_k: draw among this many most probable tokens only. Default: all.
        top_p: draw among the most probable tokens that hold this share of the probability. Default: all.
        repetition_penalty: see `penalize_repetition`; 1 is none.

    Raises:
        ValueError: a temperature below 0 or not finite, top_k below 1, top_p outside (0, 1], a repetition_penalty
            outside [0.01, 100].
        TypeError: what is no number.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Refuse settings that no distribution corresponds to."""
        for name, value in vars(self).items():
            kinds = (int,) if name == "top_k" else (int, float)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                kind = "a whole number" if name == "top_k" else "a number"
                raise TypeError(f"{name}: expected {kind}, found {value!r}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"expected a finite temperature of at least 0, found {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"expected top_k of at least 1, found {self.top_k}; leave it out to keep all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"expected top_p above 0 and at most 1, found {self.top_p}; leave it out to keep all")
        if not LEAST_PENALTY <= self.repetition_penalty <= MOST_PENALTY:
            bounds = f"from {LEAST_PENALTY} to {MOST_PENALTY:g}"
            raise ValueError(f"expected repetition_penalty {bounds}, found {self.repetition_penalty}; 1 is none")

    @property
    def looks_back(self) -> bool:
        """Whether `choose` needs to know what was seen."""
        return self.repetition_penalty != 1

    def choose(self, logits: Tensor, uniforms: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the next token of every row, int64 (batch,).

        Args:
            logits: (batch, vocab), floating, finite.
            uniforms: (batch,), float64 in [0, 1), one random number a row; not looked at when temperature is 0.
            seen: bool (batch, vocab), the tokens of each row so far; needed where `looks_back`.

        Raises:
            ValueError: a logit is NaN or infinite, or `seen` is missing.
        """
        require_finite(logits)
        if self.looks_back:
            if seen is None:
                raise ValueError("expected `seen`, which repetition_penalty needs, found None")
            logits = penalize_repetition(logits.double(), seen, self.repetition_penalty)  # beyond the range of float16
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
