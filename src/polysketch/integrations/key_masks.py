"""Attention masks of other libraries, as far as mechanisms honour them: padding of keys."""

import torch
from torch import Tensor

_HIDDEN = -9000.0  # what others add to hide a key is -10,000, which bfloat16 rounds, or the lowest number there is


def key_mask_of(mask: Tensor, batch: int, keys: int) -> Tensor:
    """Which keys are real, of a mask that says the same for every head and query.

    Args:
        mask: (batch or 1, keys): bool, True for a real key; or the numbers that are added to logits, 0 for a real key
            and -9,000 or lower for one that is hidden. On a GPU other numbers are not looked for, and hide their key.
        batch, keys: what it has to fit.

    Returns:
        (batch, keys) bool.

    Raises:
        ValueError: another shape, or numbers that do not hide a key and are not 0.
    """
    if mask.dim() != 2 or mask.shape[0] not in (1, batch) or mask.shape[1] != keys:
        raise ValueError(
            f"expected a mask that hides the same keys from every head and query, of {batch} rows and {keys} keys, "
            f"found one of the shape {tuple(mask.shape)}: mechanisms honour padding alone"
        )
    real = mask if mask.dtype == torch.bool else mask == 0
    read = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    if mask.dtype != torch.bool and read and not bool((real | (mask <= _HIDDEN)).all()):
        other = mask[~real & (mask > _HIDDEN)][0].item()
        raise ValueError(f"expected a mask of bool, or of 0 and numbers from {_HIDDEN:,.0f} down, found {other}")
    return real.expand(batch, keys)
