"""Multi-query associative recall: the value of each key, asked for after a gap."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from experiments.synthetic.task import SyntheticTask
from polysketch.data.recall import recall_batch


@dataclass(frozen=True, kw_only=True)
class RecallTask(SyntheticTask):
    """Pairs of keys and values, then each key once, to be answered by its value (see `recall_batch`).

    Attributes:
        pairs: K, the key-value pairs at the beginning of a sequence.
        filler: what stands between pairs and queries: `zero` or `random` tokens.
    """

    length: int = 96
    vocabulary: int = 128
    pairs: int = 8
    filler: Literal["zero", "random"] = "zero"

    def make_batch(self, *, seed: int, index: int) -> tuple[Tensor, Tensor]:
        """As the base class has it."""
        return recall_batch(
            self.batch_size,
            length=self.length,
            num_pairs=self.pairs,
            vocab_size=self.vocabulary,
            seed=seed,
            index=index,
            minimum_gap=self.minimum_gap,
            filler=self.filler,
        )
