"""Random numbers as a pure function of a seed and of what they are for: no generator, no state, any order."""

import torch
from torch import Tensor

RANGE = 2**32  # numbers are whole ones below it
_MASK = RANGE - 1


def random_bits(seed: int, *counters: Tensor) -> Tensor:
    """Whole numbers from 0 to 2^32 - 1, one for every combination of the counters, the same on every device.

    Args:
        seed: any whole number.
        *counters: int64 tensors that broadcast together; each is mixed in after the one before.

    Returns:
        int64, of the shape to which the counters broadcast.
    """
    mixed = _mix(torch.tensor(seed & _MASK, dtype=torch.int64, device=counters[0].device))
    for counter in counters:
        mixed = _mix((mixed + counter) & _MASK)
    return mixed


def random_uniform(seed: int, *counters: Tensor) -> Tensor:
    """float64 numbers in (0, 1), from `random_bits`."""
    return (random_bits(seed, *counters).double() + 0.5) / RANGE


def _mix(x: Tensor) -> Tensor:
    """A bijection of the numbers below 2^32 in which each bit of x changes about half of the bits.

    Shifts and multiplications in turn, as in the finalizers of well-known hash functions. The factors are below 2^31,
    so that no product leaves int64.
    """
    x = (x + 0x3C6EF372) & _MASK  # zero would stay zero
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _MASK
    return x ^ (x >> 15)
