"""One optimizer step: loss and gradient over a batch in parts, clipping, update."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polysketch.training.config import TrainingConfig
from polysketch.training.optimizer import build_optimizer, named_parameters
from polysketch.training.schedule import learning_rate_at


@dataclass(frozen=True)
class Gradient:
    """What a batch gave.

    Attributes:
        loss: mean loss in nats per token.
        norm: norm of the gradient before clipping.
    """

    loss: float
    norm: float


class Updater:
    """Computes gradients and applies them.

    Args:
        model: a TransformerLM on its device.
        config: the run's options.
        dtype: precision of the matrix products.
    """

    def __init__(self, model: Any, config: TrainingConfig, dtype: torch.dtype) -> None:
        self.model = model
        self.optimizer = build_optimizer(
            model, learning_rate=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )
        self._config = config
        self._dtype = dtype
        self._parameters = [parameter for _, parameter in named_parameters(model)]
        self._device = self._parameters[0].device
        self._loss = torch.compile(model.loss, dynamic=False) if config.compile else model.loss

    def precision(self) -> AbstractContextManager[Any]:
        """The context in which the model is to be called: autocast, unless everything is float32."""
        if self._dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def compute_gradient(self, batch: Tensor) -> Gradient:
        """Loss and clipped gradient of `batch` (windows, context + 1), int64 on the CPU, in parts of equal size.

        The gradient is that of the mean loss over the whole batch, however many parts it is computed in.
        """
        self.optimizer.zero_grad(set_to_none=True)
        parts = batch.split(len(batch) // self._config.accumulation)
        loss = sum(self._accumulate(part, len(parts)) for part in parts)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.clip)
        return Gradient(float(loss), float(norm))

    def _accumulate(self, part: Tensor, parts: int) -> Tensor:
        ids = part.to(self._device, non_blocking=True)
        with self.precision():
            loss = self._loss(ids) / parts
        loss.backward()
        return loss.detach()

    def apply(self, step: int) -> float:
        """Make the optimizer step number `step` (from 0); returns the learning rate used."""
        rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return rate

    def learning_rate(self, step: int) -> float:
        """The learning rate of optimizer step number `step` (from 0)."""
        config = self._config
        return learning_rate_at(step, steps=config.steps, warmup=config.warmup_steps, peak=config.learning_rate)
