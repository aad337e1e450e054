"""Induction heads: what followed the special token the first time is to follow it again.

The task of Olsson et al. (2022), as "Mamba" (Gu and Dao 2023, section 4.1.2) and PolySketchFormer (appendix F.2) have
it.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.synthetic.task import SyntheticTask
from polysketch.targets import NO_TARGET


@dataclass(frozen=True, kw_only=True)
class InductionTask(SyntheticTask):
    """Random tokens, among them the special one once, and again at the end: the answer is what followed it.

    The special token is the last id; all others are drawn independently, 16 of them in PolySketchFormer, so that chance
    is 1 in 16. Its place is uniform. The papers have no gap between the answer and the end; here it keeps answers out
    of reach of attention to nearby tokens alone.

    Attributes:
        test_lengths: lengths that the trained model is measured at.
        test_sequences: sequences at each of them.
    """

    length: int = 256
    vocabulary: int = 17
    test_lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    test_sequences: int = 128

    def make_batch(self, *, seed: int, index: int) -> tuple[Tensor, Tensor]:
        """As the base class has it.

        Raises:
            ValueError: the length has no place for the special token, its answer, the gap and the end, or there is but
                one other token.
        """
        places = self.length - self.minimum_gap - 2
        if places < 1 or self.vocabulary < 3:
            raise ValueError(
                f"expected a length of at least {self.minimum_gap + 3} for a gap of {self.minimum_gap} and a "
                f"vocabulary of at least 3, found {self.length} and {self.vocabulary}"
            )
        generator = np.random.default_rng([seed, index])
        special, rows = self.vocabulary - 1, np.arange(self.batch_size)
        ids = generator.integers(0, special, (self.batch_size, self.length))
        place = generator.integers(0, places, self.batch_size)
        ids[rows, place] = special
        ids[:, -1] = special
        labels = np.full_like(ids, NO_TARGET)
        labels[:, -1] = ids[rows, place + 1]
        return torch.from_numpy(ids), torch.from_numpy(labels)

    def at_test_lengths(self) -> Sequence[SyntheticTask]:
        """The task at every test length, in batches of as many tokens as those of training at most."""
        return [self._at(length) for length in self.test_lengths]

    def _at(self, length: int) -> SyntheticTask:
        rows = min(self.test_sequences, max(1, self.batch_size * self.length // length))
        return dataclasses.replace(self, length=length, batch_size=rows, eval_batches=-(-self.test_sequences // rows))
