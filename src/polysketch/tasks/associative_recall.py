"""Multi-query associative recall: the value of each key, asked for after a gap."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from polysketch.data.recall import recall_batch
from polysketch.tasks.base import GeneratedTask
from polysketch.tasks.batch import Row


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall(GeneratedTask):
    """Pairs of keys and values, then each key once, to be answered by its value (see `data.recall.recall_batch`).

    The task of "Zoology" (Arora et al. 2023), in LLOPS's tables 3 to 5.

    Attributes:
        length: tokens of a row.
        vocabulary: ids; half of them are keys, half values.
        pairs: K, the key-value pairs at the beginning of a row.
        minimum_gap: positions from the last pair's value to the first query, at least.
        filler: what stands between pairs and queries: `zero` or `random` tokens.
    """

    name = "recall"
    asks = "next"
    length: int = 512
    vocabulary: int = 8192
    pairs: int = 64
    minimum_gap: int = 0
    filler: Literal["zero", "random"] = "zero"

    def make(self, generator: np.random.Generator) -> Row:
        """As the base class has it."""
        ids, labels = recall_batch(
            1,
            length=self.length,
            num_pairs=self.pairs,
            vocab_size=self.vocabulary,
            seed=int(generator.integers(2**62)),
            index=0,
            minimum_gap=self.minimum_gap,
            filler=self.filler,
        )
        return Row(ids[0].numpy(), labels[0].numpy())
