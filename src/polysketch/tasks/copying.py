"""Selective copying: a few tokens stand at random places among noise, and are then written in their order."""

from dataclasses import dataclass

import numpy as np

from polysketch.targets import NO_TARGET
from polysketch.tasks.base import GeneratedTask
from polysketch.tasks.batch import Row

NOISE = 0


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(GeneratedTask):
    """C content tokens among noise, a gap of noise, then C markers: the k-th is answered by the k-th content token.

    The task of "Mamba" (Gu and Dao 2023, section 4.1.1), of PolySketchFormer's appendix F.1 (64,000 training rows of
    4,096 to 32,768 tokens) and, at 256 tokens, of MAD (Poli et al. 2024). Where a token stands says nothing about it.
    So a model has to find tokens by what they are, and to count them. Token 0 is noise, the last id is the marker,
    content is drawn independently from the others. Its places are a uniform draw without repetition.

    Attributes:
        length: tokens of a row.
        vocabulary: ids; the papers have 14 for content, 16 in all.
        content: C.
        minimum_gap: positions of noise between content and markers, at least. The papers have none; a gap keeps answers
            out of reach of attention to nearby tokens alone.
    """

    name = "selective-copying"
    asks = "next"
    length: int = 4096
    vocabulary: int = 16
    content: int = 16
    minimum_gap: int = 0

    def make(self, generator: np.random.Generator) -> Row:
        """As the base class has it."""
        places = self.length - self.minimum_gap - self.content
        if not 1 <= self.content <= places or self.vocabulary < 3 or self.minimum_gap < 0:
            raise ValueError(
                f"expected a length of at least {2 * self.content + self.minimum_gap} for {self.content} content "
                f"tokens, as many markers and a gap of {self.minimum_gap}, and a vocabulary of at least 3, found "
                f"{self.length} and {self.vocabulary}"
            )
        content = generator.integers(1, self.vocabulary - 1, self.content)
        ids = np.full(self.length, NOISE)
        ids[np.sort(generator.choice(places, self.content, replace=False))] = content
        ids[-self.content :] = self.vocabulary - 1
        answer = np.full(self.length, NO_TARGET)
        answer[-self.content :] = content
        return Row(ids, answer)
