"""One variant's run on associative recall: training on fresh batches, accuracy on held-out ones."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.foundation.recall_model import RecallLM
from experiments.foundation.variants import Variant
from polysketch.data.recall import IGNORED_LABEL, recall_batch
from polysketch.evaluation import recall_accuracy
from polysketch.models import ModelConfig, TransformerLM
from polysketch.training.step import build_optimizer

SOLVED = 0.997
_HELD_OUT = 1_000_000  # added to the seed: another stream of batches than training's


@dataclass(frozen=True)
class RecallTask:
    """What is to be recalled, by what model, trained how.

    Attributes:
        length: positions of a sequence.
        pairs: K, the key-value pairs at its beginning, each asked for once.
        vocabulary: number of token ids.
        local_chunk: tokens of a chunk with exact weights.
        minimum_gap: positions between the pairs and the first query, at least.
        filler: what stands between: `zero` or `random` tokens.
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
    """

    length: int = 96
    pairs: int = 8
    vocabulary: int = 128
    local_chunk: int = 16
    minimum_gap: int = 32
    filler: Literal["zero", "random"] = "zero"
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

    @property
    def num_heads(self) -> int:
        """Heads of a layer: 64 wide, since the contrast of a polynomial weight grows with the width squared."""
        return self.width // 64

    def batch(self, index: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Ids and labels, int64 (batch_size, length), a pure function of the task and `index`."""
        return recall_batch(
            self.batch_size,
            length=self.length,
            num_pairs=self.pairs,
            vocab_size=self.vocabulary,
            seed=self.seed + (_HELD_OUT if held_out else 0),
            index=index,
            minimum_gap=self.minimum_gap,
            filler=self.filler,
        )

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches that accuracy is measured on, always the same."""
        return (self.batch(index, held_out=True) for index in range(self.eval_batches))

    def model(self, variant: Variant) -> TransformerLM:
        """The model with its initial weights, its prefix gains calibrated on one held-out batch without labels."""
        torch.manual_seed(self.seed)
        config = ModelConfig(
            vocab_size=self.vocabulary,
            num_layers=self.layers,
            hidden_size=self.width,
            num_heads=self.num_heads,
            attention=variant.attention,
            attention_options=variant.attention_options(local_chunk=self.local_chunk, num_heads=self.num_heads),
        )
        model = RecallLM(config)
        model.calibrate(self.batch(0, held_out=True)[0])
        return model


class RecallRun:
    """Training of one variant until it solves the task or its steps or minutes are spent.

    Args:
        task: the task.
        variant: the mechanism.
        say: gets a line for every measurement.
    """

    def __init__(self, task: RecallTask, variant: Variant, say: Callable[[str], None] = print) -> None:
        self._task, self._variant, self._say = task, variant, say
        self._model = task.model(variant)
        self._optimizer = build_optimizer(
            self._model, learning_rate=task.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._step, self._seconds, self._loss = 0, 0.0, math.nan
        self._curve: list[dict[str, float]] = []

    def train(self) -> dict[str, Any]:
        """Make the run.

        Returns:
            Its record: accuracy over steps, how it ended, shares of the prefix, accuracy with the prefix removed.
        """
        shares = [self._shares()]
        started = time.monotonic()
        while not self._over(time.monotonic() - started):
            self._loss = self._make_step()
            if self._step % self._task.eval_every == 0:
                self._measure()
        if not self._curve or self._curve[-1]["step"] != self._step:
            self._measure()
        shares.append(self._shares())
        return {
            "parameters": self._model.num_parameters(),
            "steps": self._step,
            "seconds": round(self._seconds, 2),
            "seconds_per_step": self._seconds / max(1, self._step),
            "accuracy": self._curve[-1]["accuracy"],
            "solved_at_step": self._step if self._solved() else None,
            "curve": self._curve,
            "prefix_shares": dict(zip(("start", "end"), shares, strict=True)),
            "accuracy_without_prefix": self._accuracy_without_prefix(),
        }

    def _over(self, seconds: float) -> bool:
        return self._solved() or self._step >= self._task.steps or seconds >= 60 * self._task.minutes

    def _solved(self) -> bool:
        return bool(self._curve) and self._curve[-1]["accuracy"] >= SOLVED

    def _make_step(self) -> float:
        ids, labels = self._task.batch(self._step)
        started = time.perf_counter()
        loss = recall_loss(self._model, ids, labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._task.learning_rate * min(1.0, (self._step + 1) / max(1, self._task.warmup))
        self._optimizer.step()
        self._step += 1
        self._seconds += time.perf_counter() - started
        return float(loss.detach())

    def _measure(self) -> None:
        accuracy = recall_accuracy(self._model, self._task.held_out())
        point = {"step": self._step, "seconds": round(self._seconds, 2), "loss": self._loss, "accuracy": accuracy}
        self._curve.append(point)
        self._say(f"{self._variant.name}: step {self._step}  loss {self._loss:.4f}  accuracy {100 * accuracy:.1f} %")

    def _shares(self) -> list[list[float]]:
        """(layers, heads) shares of the prefix on a held-out batch; empty without a prefix."""
        shares = self._model.prefix_shares(self._task.batch(0, held_out=True)[0])
        return [heads.tolist() for heads in shares.values()]

    def _accuracy_without_prefix(self) -> float | None:
        if not self._variant.has_prefix:
            return None
        self._model.remove_prefix()
        return recall_accuracy(self._model, self._task.held_out())


def recall_loss(model: TransformerLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy (nats) at the labelled positions."""
    asked = labels != IGNORED_LABEL
    hidden = model.hidden_states(ids)[asked]
    return model.token_losses(hidden.unsqueeze(0), labels[asked].unsqueeze(0)).mean()
