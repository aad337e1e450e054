"""Random numbers for sampling that belong to a prompt, not to its place in a batch."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["PromptUniforms", "RowUniforms"]


class PromptUniforms:
    """The stream of uniform numbers of one sample of a prompt. Drawn on the CPU, the same for every device.

    A stream that is never drawn from costs nothing.

    Args:
        prompt: token ids.
        seed: of the draws.
        sample: which of several samples of this prompt, from 0.
    """

    def __init__(self, prompt: Sequence[int], seed: int, sample: int = 0) -> None:
        self._seed, self._sample, self._prompt = seed, sample, prompt

    def next(self) -> Tensor:
        """Return the next number: float64 (1,) in [0, 1)."""
        return torch.rand(1, dtype=torch.float64, generator=self._generator)

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(_mix(self._seed, self._sample, tuple(self._prompt)))


class RowUniforms:
    """One stream of uniform numbers for every row.

    A row's stream depends on the seed, its prompt, and how many equal prompts stand before it: so a prompt draws the
    same numbers whatever else is in the batch, and asking for the same prompt several times gives several samples.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], seed: int) -> None:
        self._rows = []
        earlier: Counter[tuple[int, ...]] = Counter()
        for prompt in map(tuple, prompts):
            self._rows.append(PromptUniforms(prompt, seed, earlier[prompt]))
            earlier[prompt] += 1

    def next(self) -> Tensor:
        """Return the next number of every row: float64 (batch,) in [0, 1)."""
        return torch.cat([row.next() for row in self._rows])


def _mix(seed: int, occurrence: int, prompt: tuple[int, ...]) -> int:
    """Return a 63-bit seed in which every bit of the arguments counts; the same in every process."""
    digest = hashlib.sha256(repr((seed, occurrence, prompt)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
