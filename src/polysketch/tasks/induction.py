"""Induction heads: what followed the special token the first time is to follow it again."""

from dataclasses import dataclass

import numpy as np

from polysketch.targets import NO_TARGET
from polysketch.tasks.base import GeneratedTask
from polysketch.tasks.batch import Row


@dataclass(frozen=True, kw_only=True)
class Induction(GeneratedTask):
    """Random tokens, among them the special one once, and again at the end: the answer is what followed it.

    The task of Olsson et al. (2022), as "Mamba" (Gu and Dao 2023, section 4.1.2) and PolySketchFormer (appendix F.2,
    128 and 256 tokens) have it. The special token is the last id. All others are drawn independently, and its place is
    uniform.

    Attributes:
        length: tokens of a row.
        vocabulary: ids, the special one included.
        minimum_gap: positions between the answer and the end, at least. The papers have none; a gap keeps answers out
            of reach of attention to nearby tokens alone.
    """

    name = "induction"
    asks = "next"
    length: int = 256
    vocabulary: int = 17
    minimum_gap: int = 0

    def make(self, generator: np.random.Generator) -> Row:
        """As the base class has it."""
        places = self.length - self.minimum_gap - 2
        if places < 1 or self.vocabulary < 3 or self.minimum_gap < 0:
            raise ValueError(
                f"expected a length of at least {self.minimum_gap + 3} for a gap of {self.minimum_gap} and a "
                f"vocabulary of at least 3, found {self.length} and {self.vocabulary}"
            )
        special, place = self.vocabulary - 1, int(generator.integers(places))
        ids = generator.integers(0, special, self.length)
        ids[[place, -1]] = special
        answer = np.full(self.length, NO_TARGET)
        answer[-1] = ids[place + 1]
        return Row(ids, answer)
