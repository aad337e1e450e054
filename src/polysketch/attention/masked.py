"""What stands at masked tokens is taken out before anything is computed of it, so that it reaches no gradient either.

A weight of zero does not keep a NaN away: zero times NaN is NaN, in a product of weights and values as in the gradient
of a norm, which sums over all tokens.
"""

import torch
from torch import Tensor


def without_masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x (batch, heads, length, width) with zeros at masked tokens, whatever stands there."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0.0)


def finite_at_masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x with zeros at masked tokens that hold any number that is not finite.

    For what asks, not for what is asked: a query of another sequence is real where a key is masked.

    Args:
        x: (batch, heads, length, width) or (batch, length, width).
        key_mask: (batch, another length) leaves x as it is.
    """
    if key_mask is None or x.shape[-2] != key_mask.shape[1]:
        return x
    wide, rest = torch.promote_types(x.dtype, torch.float32), (1, 3) if x.dim() == 4 else (2,)
    kept = key_mask | x.detach().sum(rest, dtype=wide).isfinite()
    return x.masked_fill(~(kept[:, None, :, None] if x.dim() == 4 else kept[:, :, None]), 0.0)
