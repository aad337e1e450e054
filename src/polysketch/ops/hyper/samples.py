"""Keys drawn to stand for all those that are not attended exactly: which ones, and what each one counts.

Random numbers are a pure function of a seed and of what they are for: no generator, no state, any order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SAMPLING = ("uniform", "norm")
"""How keys are drawn for the numerator; for the denominator always uniformly."""

_LAST = torch.iinfo(torch.int64).max
_RANGE = 2**32  # random numbers are whole ones below it
_MASK = _RANGE - 1


class Samples(NamedTuple):
    """Keys drawn from those of a node.

    Attributes:
        key: (batch, key_heads, nodes, m) int64, which keys.
        real: (batch, key_heads, nodes, m) bool, False where there was nothing to draw.
        log_weight: (batch, key_heads, nodes, m), the log of what each counts; None where that depends on how many of
            the samples a query does not attend exactly, as for uniform ones.
    """

    key: Tensor
    real: Tensor
    log_weight: Tensor | None

    def log_weights(self, covered: Tensor, count: Tensor, covered_count: Tensor) -> Tensor:
        """(batch, key_heads, nodes, tiles, m): the log of what each sample counts for a tile, -inf if not at all.

        A uniform sample counts (keys not attended exactly) / (samples not attended exactly).

        Args:
            covered: (batch, key_heads, nodes, tiles, m) bool, the tile attends to this sample exactly.
            count: (batch, 1, nodes) real keys of the node.
            covered_count: (batch, key_heads, nodes, tiles) real keys that the tile attends to exactly.
        """
        used = self.real.unsqueeze(-2) & ~covered
        if self.log_weight is not None:
            return self.log_weight.unsqueeze(-2).masked_fill(~used, -torch.inf)
        rest = (count.unsqueeze(-1) - covered_count).double()
        each = (rest / used.sum(-1).clamp(min=1)).log()
        return torch.where(used, each.unsqueeze(-1), -torch.inf)


def draw_uniform(key: Tensor, real: Tensor, start: Tensor, sample_size: int, seed: int) -> Samples:
    """`sample_size` different keys, each set of them equally likely; all keys where there are not more.

    The key at a position has a random number that depends on the seed, its head and its position, and those with the
    smallest numbers are drawn: so earlier ones do not depend on later tokens, nor on the batch.

    Args:
        key: (batch, key_heads, nodes, n, any); its shape and device count.
        real: (batch or 1, nodes, n) bool, False for keys that count for nothing.
        start: (nodes,) int64, the position of each node's first key.
        sample_size: at least 1.
        seed: any whole number.
    """
    batch, heads, nodes, length, _ = key.shape
    shape, size = (batch, heads, nodes, min(sample_size, length)), min(sample_size, length)
    if size == length:
        index = torch.arange(length, device=key.device).expand(shape)
        return Samples(index, real.unsqueeze(1).expand(shape), None)
    head = torch.arange(heads, device=key.device)[:, None, None]
    position = start[:, None] + torch.arange(length, device=key.device)
    # The position below the random bits makes every number another one.
    priority = (random_bits(seed, head, position) << 31) | position
    priority = priority.masked_fill(~real.unsqueeze(1), _LAST)
    smallest, index = priority.topk(size, dim=-1, largest=False)
    return Samples(index.expand(shape), (smallest < _LAST).expand(shape), None)


def draw_by_norm(value: Tensor, real: Tensor, start: Tensor, sample_size: int, seed: int, uniform: Samples) -> Samples:
    """`sample_size` independent draws with P(l) = |v_l|^2 / |V|_F^2, each of the weight 1 / (m P(l)) (Lemma 2).

    They stand for sums of weighted values alone: a key whose value is zero is never drawn, and a sum of weights without
    it would be too small. Where there are not more keys than samples, all keys, each counted once. The weights are
    constants to the backward pass, which estimates the exact gradient by the same draws then.

    Args:
        value: (batch, key_heads, nodes, n, value_dim).
        real, start, sample_size, seed: as in `draw_uniform`.
        uniform: what that has drawn with the same arguments; these draws do not depend on it.
    """
    heads, length = value.shape[1], value.shape[3]
    if sample_size >= length:
        return uniform._replace(log_weight=torch.zeros_like(uniform.key, dtype=value.dtype))
    with torch.no_grad():
        mass = value.detach().double().square().sum(-1).masked_fill(~real.unsqueeze(1), 0.0)
        cumulative = mass.cumsum(-1)
        total = cumulative[..., -1:]
        head = torch.arange(heads, device=value.device)[:, None, None]
        draw = torch.arange(sample_size, device=value.device)
        points = random_uniform(seed, head, start[:, None], draw) * total
        index = torch.searchsorted(cumulative, points.contiguous(), right=True).clamp(max=length - 1)
        drawn = mass.gather(-1, index)
        log_weight = (total / (sample_size * drawn)).log()
        few = (real.sum(-1) <= sample_size)[:, None, :, None]  # all real keys are among the uniform ones then
        return Samples(
            torch.where(few, uniform.key, index),
            torch.where(few, uniform.real, drawn > 0),
            torch.where(few, 0.0, log_weight),
        )


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
    return (random_bits(seed, *counters).double() + 0.5) / _RANGE


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
