"""Selective copying: a few tokens stand at random places among noise, and are then written in their order.

The task of "Mamba" (Gu and Dao 2023, section 4.1.1) and of PolySketchFormer's appendix F.1. Where a token stands says
nothing about it, so that a model has to find the tokens by what they are and count them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.synthetic.task import SyntheticTask
from polysketch.targets import NO_TARGET

NOISE = 0


@dataclass(frozen=True, kw_only=True)
class SelectiveCopyingTask(SyntheticTask):
    """C content tokens among noise, a gap of noise, then C markers: the k-th is answered by the k-th content token.

    Token 0 is noise, the last id is the marker, and content tokens are drawn independently from those between them, of
    which the papers have 14. Their places are a uniform draw without repetition. The papers have no gap; here it keeps
    answers out of reach of attention to nearby tokens alone.

    Attributes:
        content: C.
    """

    length: int = 1024
    vocabulary: int = 16
    content: int = 16

    def make_batch(self, *, seed: int, index: int) -> tuple[Tensor, Tensor]:
        """As the base class has it.

        Raises:
            ValueError: the content does not fit the length and the gap, or there are no content tokens.
        """
        places = self.length - self.minimum_gap - self.content
        if not 1 <= self.content <= places or self.vocabulary < 3:
            raise ValueError(
                f"expected a length of at least {2 * self.content + self.minimum_gap} for {self.content} content "
                f"tokens, as many markers and a gap of {self.minimum_gap}, and a vocabulary of at least 3, found "
                f"{self.length} and {self.vocabulary}"
            )
        generator = np.random.default_rng([seed, index])
        content = generator.integers(1, self.vocabulary - 1, (self.batch_size, self.content))
        order = np.argsort(generator.random((self.batch_size, places)), axis=1)
        ids = np.full((self.batch_size, self.length), NOISE, dtype=np.int64)
        np.put_along_axis(ids, np.sort(order[:, : self.content], axis=1), content, axis=1)
        ids[:, -self.content :] = self.vocabulary - 1
        labels = np.full_like(ids, NO_TARGET)
        labels[:, -self.content :] = content
        return torch.from_numpy(ids), torch.from_numpy(labels)
