"""What synthetic tasks share: labelled sequences without end, the model, and how it is trained."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.foundation.variants import Variant
from polysketch.models import ModelConfig, TransformerLM

_HELD_OUT = 1_000_000  # added to the seed: another stream of batches than training's


@dataclass(frozen=True, kw_only=True)
class SyntheticTask(ABC):
    """What is asked, of what model, trained how. A task has its fields and `make_batch`.

    Attributes:
        length: positions of a sequence.
        vocabulary: number of token ids.
        local_chunk: tokens of a chunk or a window with exact weights.
        minimum_gap: positions between what is to be remembered and where it is asked for, at least.
        layers: transformer blocks.
        width: hidden size; heads are 64 wide.
        batch_size: sequences of a step.
        learning_rate: of AdamW, after the warm-up; constant.
        warmup: steps over which it rises.
        steps: at most so many.
        minutes: stop after so many, evaluations included.
        eval_every: steps between measurements of the accuracy.
        eval_batches: held-out batches of a measurement.
        seed: of weights and data.
        rotary: whether queries and keys have rotary positions.
    """

    length: int
    vocabulary: int
    local_chunk: int = 16
    minimum_gap: int = 32
    layers: int = 2
    width: int = 128
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup: int = 50
    steps: int = 600
    minutes: float = 10.0
    eval_every: int = 50
    eval_batches: int = 8
    seed: int = 0
    rotary: bool = True

    @abstractmethod
    def make_batch(self, *, seed: int, index: int) -> tuple[Tensor, Tensor]:
        """Ids and labels, int64 (batch_size, length), a pure function of the task and the arguments.

        The label of a position is the token that should follow it, and -100 where nothing is asked.
        """

    @property
    def num_heads(self) -> int:
        """Heads of a layer: 64 wide, since the contrast of a polynomial weight grows with the width squared."""
        return self.width // 64

    def batch(self, index: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Batch `index` of training, or of what accuracy is measured on, as `make_batch` gives it."""
        return self.make_batch(seed=self.seed + (_HELD_OUT if held_out else 0), index=index)

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches that accuracy is measured on, always the same."""
        return (self.batch(index, held_out=True) for index in range(self.eval_batches))

    def at_test_lengths(self) -> "Sequence[SyntheticTask]":
        """The same task at the lengths that the trained model is measured at too; none unless a task has some."""
        return ()

    def model(self, variant: Variant) -> TransformerLM:
        """The model with its initial weights, its prefix gains calibrated on one held-out batch without labels.

        It is the library's, with what its presets have around attention: a convolution of queries, keys and values,
        and normed queries and keys. It has no sinusoidal positions, which would be new to it at other lengths.
        """
        torch.manual_seed(self.seed)
        config = ModelConfig(
            vocab_size=self.vocabulary,
            num_layers=self.layers,
            hidden_size=self.width,
            num_heads=self.num_heads,
            input_positions=False,
            rotary=self.rotary,
            projection_convolution=4,
            query_key_norm=True,
            attention=variant.attention,
            attention_options=variant.attention_options(local_chunk=self.local_chunk, num_heads=self.num_heads),
        )
        model = TransformerLM(config)
        model.calibrate(self.batch(0, held_out=True)[0])
        return model
