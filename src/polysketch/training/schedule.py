"""The learning rate as a pure function of the step, so that a resumed run needs nothing but its step."""

import math
from collections.abc import Callable

_COSINE_END = 0.1  # of the peak
_DECAY_SHARE = 5  # "wsd" decays over the last fifth


def learning_rate_at(step: int, *, steps: int, warmup: int, peak: float, schedule: str = "linear") -> float:
    """The learning rate of an optimizer step: a linear warm-up to `peak`, then what the schedule says.

    The first step has rate `peak / warmup`, the rate is `peak` at step `warmup - 1` and at the next one, and the last
    step still has a rate above zero. After the warm-up:

    - "linear": straight down towards zero (PolySketchFormer, section 4: 10k of 125k steps are warm-up).
    - "cosine": down along half a cosine towards a tenth of the peak (Hoffmann et al., arXiv 2203.15556).
    - "wsd": at the peak, then over the last fifth of all steps straight down towards zero (warm-up, stable, decay; Hu
      et al., arXiv 2404.06395; the length after Hägele et al., arXiv 2405.18392). Until the decay begins, the rate
      does not depend on `steps`.

    Args:
        step: number of optimizer steps already made, 0 <= step < steps.
        steps: number of steps of the whole run.
        warmup: number of steps of the warm-up, 0 <= warmup <= steps.
        peak: the largest learning rate.
        schedule: "linear", "cosine" or "wsd".

    Raises:
        ValueError: another schedule.
    """
    if schedule not in _AFTER_WARMUP:
        raise ValueError(f"--schedule: expected {', '.join(_AFTER_WARMUP)}, found {schedule!r}")
    if step < warmup:
        return peak * (step + 1) / warmup
    return _AFTER_WARMUP[schedule](peak, steps - step, max(1, steps - warmup), steps)


def _linear(peak: float, left: int, length: int, steps: int) -> float:
    return peak * left / length


def _cosine(peak: float, left: int, length: int, steps: int) -> float:
    return peak * (_COSINE_END + (1 - _COSINE_END) * (1 - math.cos(math.pi * left / length)) / 2)


def _wsd(peak: float, left: int, length: int, steps: int) -> float:
    decay = max(1, min(steps // _DECAY_SHARE, length))
    return _linear(peak, min(left, decay), decay, steps)


_AFTER_WARMUP: dict[str, Callable[[float, int, int, int], float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
}
"""Schedule -> the rate, from the peak, the steps left, the steps after the warm-up, and all steps."""
