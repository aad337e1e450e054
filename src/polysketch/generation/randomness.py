"""Random numbers for sampling that belong to a prompt, not to its place in a batch."""

import hashlib
import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["PromptUniforms", "RowUniforms", "earlier_equals"]


def earlier_equals(prompts: Iterable[Sequence[int] | str]) -> list[int]:
    """How many equal prompts stand before each: which sample of its prompt it is."""
    seen: Counter[Hashable] = Counter()
    counts = []
    for prompt in prompts:
        key = prompt if isinstance(prompt, str) else tuple(prompt)
        counts.append(seen[key])
        seen[key] += 1
    return counts


class PromptUniforms:
    """The stream of uniform numbers of one sample of a prompt. Drawn on the CPU, the same for every device.

    A stream that is never drawn from costs nothing.

    Args:
        prompt: token ids.
        seed: of the draws.
        sample: which of several samples of this prompt, from 0.
    """

    def __init__(self, prompt: Sequence[int], seed: int, sample: int = 0) -> None:
        self._seed, self._sample, self._prompt = operator.index(seed), sample, prompt

    def next(self) -> Tensor:
        """Return the next number: float64 (1,) in [0, 1)."""
        return torch.rand(1, dtype=torch.float64, generator=self._generator, device="cpu")

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(_mix(self._seed, self._sample, tuple(self._prompt)))


class RowUniforms:
    """One stream of uniform numbers for every row.

    A row's stream depends on the seed, its prompt, and which sample of it the row is: so a prompt draws the same
    numbers whatever else is in the batch, and asking for the same prompt several times gives several samples.

    Args:
        prompts: token ids.
        seed: of the draws.
        samples: a number for each prompt. Default: how many equal prompts stand before it.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], seed: int, samples: Sequence[int] | None = None) -> None:
        samples = earlier_equals(prompts) if samples is None else samples
        self._rows = [PromptUniforms(prompt, seed, sample) for prompt, sample in zip(prompts, samples, strict=True)]

    def next(self) -> Tensor:
        """Return the next number of every row: float64 (batch,) in [0, 1)."""
        return torch.cat([row.next() for row in self._rows])


def _mix(seed: int, occurrence: int, prompt: tuple[int, ...]) -> int:
    """Return a 63-bit seed in which every bit of the arguments counts; the same in every process."""
    digest = hashlib.sha256(repr((seed, occurrence, prompt)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
