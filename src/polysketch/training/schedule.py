"""The learning rate as a function of the step."""


def learning_rate_at(step: int, *, steps: int, warmup: int, peak: float) -> float:
    """Linear warm-up to `peak`, then linear decay towards zero (PolySketchFormer, section 4: 10k of 125k steps).

    A pure function, so that a resumed run needs nothing but its step. The first step has rate `peak / warmup`, the
    rate is `peak` at step `warmup - 1`, and the last step still has a rate above zero.

    Args:
        step: number of optimizer steps already made, 0 <= step < steps.
        steps: number of steps of the whole run.
        warmup: number of steps of the warm-up, 0 <= warmup <= steps.
        peak: the largest learning rate.

    Returns:
        The learning rate of optimizer step number `step` (from 0).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (steps - step) / max(1, steps - warmup)
