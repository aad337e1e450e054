"""One variant's run on a synthetic task: training on fresh batches, accuracy on held-out ones."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from experiments.foundation.variants import Variant
from experiments.synthetic.task import SyntheticTask
from polysketch.evaluation import recall_accuracy
from polysketch.models import TransformerLM
from polysketch.models.modes import evaluation_mode
from polysketch.targets import NO_TARGET
from polysketch.training.step import build_optimizer

SOLVED = 0.997


class TaskRun:
    """Training of one variant until it solves the task or its steps or minutes are spent.

    Args:
        task: the task.
        variant: the mechanism.
        say: gets a line for every measurement.
    """

    def __init__(self, task: SyntheticTask, variant: Variant, say: Callable[[str], None] = print) -> None:
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
            Its record: accuracy over steps, how it ended, the share of sequences with every answer right, accuracy by
            length where the task has test lengths, shares of the prefix, accuracy with the prefix removed.
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
            "whole_sequences": whole_sequences(self._model, self._task.held_out()),
            "accuracy_by_length": self._accuracy_by_length(),
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
        loss = answer_loss(self._model, ids, labels)
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

    def _accuracy_by_length(self) -> dict[str, float]:
        tasks = self._task.at_test_lengths()
        return {str(task.length): recall_accuracy(self._model, task.held_out()) for task in tasks}

    def _accuracy_without_prefix(self) -> float | None:
        if not self._variant.has_prefix:
            return None
        self._model.remove_prefix()
        return recall_accuracy(self._model, self._task.held_out())


def answer_loss(model: TransformerLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy (nats) at the labelled positions."""
    asked = labels != NO_TARGET
    hidden = model.hidden_states(ids)[asked]
    return model.token_losses(hidden.unsqueeze(0), labels[asked].unsqueeze(0)).mean()


def whole_sequences(model: TransformerLM, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The share of sequences whose every answer is the most probable token; batches as `make_batch` gives them."""
    right: list[bool] = []
    with evaluation_mode(model), torch.inference_mode():
        for ids, labels in batches:
            asked = labels != NO_TARGET
            wrong = torch.zeros_like(asked)
            wrong[asked] = model.logits(model.hidden_states(ids)[asked]).argmax(-1) != labels[asked]
            right += (~wrong.any(1)).tolist()
    return sum(right) / len(right)
