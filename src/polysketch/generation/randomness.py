"""Random numbers for sampling that belong to a prompt, not to its place in a batch."""

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["RowUniforms"]


class RowUniforms:
    """One stream of uniform numbers for every row, from a generator of its own.

    A row's stream depends on the seed, its prompt, and how many equal prompts stand before it: so a prompt draws the
    same numbers whatever else is in the batch, and asking for the same prompt several times gives several samples.
    Numbers are drawn on the CPU, the same for every device.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], seed: int) -> None:
        self._generators = []
        earlier: Counter[tuple[int, ...]] = Counter()
        for prompt in map(tuple, prompts):
            self._generators.append(torch.Generator().manual_seed(_mix(seed, earlier[prompt], prompt)))
            earlier[prompt] += 1

    def next(self) -> Tensor:
        """Return the next number of every row: float64 (batch,) in [0, 1)."""
        return torch.cat([torch.rand(1, dtype=torch.float64, generator=each) for each in self._generators])


def _mix(seed: int, occurrence: int, prompt: tuple[int, ...]) -> int:
    """Return a 63-bit seed in which every bit of the arguments counts; the same in every process."""
    digest = hashlib.sha256(repr((seed, occurrence, prompt)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
