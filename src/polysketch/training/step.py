"""One optimizer step: gradient over a batch in parts, clipping, learning rate, AdamW or Muon."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polysketch.data import LaneBatch, PackedBatch
from polysketch.distributed import ContextGroup
from polysketch.distributed.processes import Processes
from polysketch.distributed.shares import set_last_part, whole
from polysketch.tasks import TaskBatch
from polysketch.training.carried import CarriedStates
from polysketch.training.muon import Muon, muon_matrices
from polysketch.training.options import StepOptions
from polysketch.training.schedule import learning_rate_at
from polysketch.training.tensors import trained_parameters

Batch = Tensor | PackedBatch | TaskBatch
"""What a step is made of: windows, documents, or rows of a task."""

_TILE = 16_384
"""Most tokens that are inside a block at a time, where what is inside is computed again and rows are shared."""


@dataclass(frozen=True)
class Gradient:
    """What a batch gave.

    Attributes:
        loss: mean loss in nats per token.
        norm: norm of the gradient before clipping.
        tokens: number of tokens that were predicted.
    """

    loss: float
    norm: float
    tokens: int


class Updater:
    """Computes gradients and applies them.

    Args:
        model: what is trained, on its device: `model.loss(ids)` is the mean loss of windows,
            `model.loss(ids, targets, cu_seqlens)` that of packed documents, and
            `model.loss(ids, targets, carried=rows)` that of documents in lanes, and
            `model.loss(**inputs, targets=answers)` that of a task.
        options: of the optimizer steps.
        dtype: precision of the matrix products.
        processes: those that compute each batch, this one among them; the model is shared out over them already.

    Attributes:
        model: as given.
        optimizer: of the model's trained parameters, AdamW or Muon.
        carried: what documents in lanes leave to their next rows; of this process's lanes.
    """

    def __init__(
        self, model: Any, options: StepOptions, dtype: torch.dtype, processes: Processes | None = None
    ) -> None:
        self.model = model
        self.optimizer = build_optimizer(
            model,
            learning_rate=options.learning_rate,
            betas=options.betas,
            weight_decay=options.weight_decay,
            name=options.optimizer,
        )
        self.carried = CarriedStates()
        self._options = options
        self._dtype = dtype
        self._processes = processes or Processes()
        self._parameters = list(trained_parameters(model).values())
        self._device = self._parameters[0].device
        self._loss = torch.compile(model.loss, dynamic=False) if options.compile else model.loss

    def precision(self) -> AbstractContextManager[Any]:
        """The context in which the model is to be called."""
        return precision(self._dtype, self._device)

    def compute_gradient(self, batch: Batch) -> Gradient:
        """Loss and clipped gradient of a batch, in parts of as many rows each.

        The gradient is that of the mean loss over all predicted tokens of the batch, however many parts it is computed
        in, and however many processes have a share of each part: a share weighs as many as it predicts. Processes that
        share rows have one share, each a span of its rows.

        Args:
            batch: windows (rows, context + 1), int64 on the CPU, or packed documents, or documents in lanes, step after
                step, or rows of a task; the same on every process.
        """
        self.optimizer.zero_grad(set_to_none=True)
        parts = batch.split(len(batch) // self._options.accumulation)
        total = sum(_predicted(part) for part in parts)
        losses = [self._accumulate(part, total, last=part is parts[-1]) for part in parts]
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._options.clip)
        loss = self._processes.add_up(sum(losses[1:], losses[0]))
        sharing = self._processes.mesh.context  # each of those that share rows has the loss of all of them
        return Gradient(float(loss) / sharing, float(whole(norm)), total)

    def _accumulate(self, part: Batch, total: int, *, last: bool) -> Tensor:
        """Add the gradient of this process's share of a part of the batch, which has `total` predicted tokens."""
        share = self._share(part)
        divisor = total / _predicted(share)
        set_last_part(self.model, last)
        with self.precision():
            loss = self._loss_of(share) / divisor
        loss.backward()
        return loss.detach()

    def _loss_of(self, share: Batch) -> Tensor:
        """The mean loss, whose gradient is that of this process's spans where rows are shared.

        Offsets of documents stay in host memory, where they are read.
        """
        if isinstance(share, LaneBatch):
            return self._loss_of_lanes(share)
        if isinstance(share, Tensor):
            ids = share.to(self._device, non_blocking=True)
            return self._loss(ids, **self._context(ids[:, 1:]))  # the last token of a window is a target alone
        share = share.to(self._device)
        if isinstance(share, TaskBatch):
            return self._loss(**share.inputs, targets=share.answers)
        return self._loss(share.ids, share.targets, share.cu_seqlens, **self._context(share.ids))

    def _context(self, ids: Tensor) -> dict[str, ContextGroup]:
        """Those that share these rows, for the model's loss; nothing where none do."""
        context = self._processes.context
        if context is None:
            return {}
        return {"context": context.in_smaller_tiles(_smaller_tiles(self.model, ids, context.ranks))}

    def _loss_of_lanes(self, share: LaneBatch) -> Tensor:
        """With what the rows before left; what these leave is kept."""
        ids, targets = (each.to(self._device, non_blocking=True) for each in (share.ids, share.targets))
        rows = self.carried.rows(share)
        loss: Tensor = self._loss(ids, targets, carried=rows)
        self.carried.take(share, rows)
        return loss

    def load_carried(self, tensors: Mapping[str, Tensor], batch_size: int) -> None:
        """Go on with what `carried.tensors()` gave on all processes, as far as it is of this one's lanes."""
        parts = torch.arange(batch_size).split(batch_size // self._options.accumulation)
        lanes = {int(lane) for part in parts for lane in self._share(part)}  # type: ignore[union-attr]
        self.carried.load(tensors, lanes, self._device)

    def _share(self, part: Batch) -> Batch:
        """The rows of a part of the batch that are this process's, or of those that share them with it."""
        count = self._processes.data_count
        return part if count == 1 else part.split(len(part) // count)[self._processes.data_rank]

    def apply(self, step: int) -> float:
        """Make the optimizer step number `step` (from 0); returns the learning rate used."""
        options = self._options
        rate = learning_rate_at(
            step,
            steps=options.steps,
            warmup=options.warmup,
            peak=options.learning_rate,
            schedule=options.schedule,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return rate


def precision(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a model computes matrix products in `dtype`: autocast, unless everything is float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def _smaller_tiles(model: Any, ids: Tensor, processes: int) -> int:
    """In how many tiles each of several processes computes its spans of rows, (rows, length) tokens in all.

    A power of two, so that tiles of rows of a round length end where chunks of tokens do.
    """
    if not model.activation_checkpointing:
        return 1
    tiles = 1
    while tiles * processes * _TILE < ids.numel() and 2 * tiles * processes <= ids.shape[1]:
        tiles *= 2
    return tiles


def _predicted(part: Batch) -> int:
    """Number of tokens, or answers, that are predicted."""
    return part[:, 1:].numel() if isinstance(part, Tensor) else part.num_tokens


def build_optimizer(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float, name: str = "adamw"
) -> torch.optim.Optimizer:
    """One optimizer of the model's trained parameters: matrices decay, vectors and scalars do not.

    Biases, gains and factors of heads have one axis and are left alone; weights, sketches and the embedding have two.
    So have the scales of `focused` and the exponents of `polarity`, one for each dimension of each head: they decay to
    0, the value that they start with.

    Args:
        model: the model, already on its device.
        learning_rate: rate of the first step; `Updater` sets it anew before every step.
        betas: decay rates of AdamW's two running moments.
        weight_decay: decoupled decay of the matrices.
        name: "adamw", one fused pass over all parameters per step; or "muon", see `Muon`.

    Raises:
        ValueError: another name.
    """
    if name not in ("adamw", "muon"):
        raise ValueError(f"--optimizer: expected adamw or muon, found {name!r}")
    matrices = muon_matrices(model) if name == "muon" else {}
    parameters = [parameter for parameter in trained_parameters(model).values() if parameter not in matrices]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if name == "muon":
        return Muon(matrices, groups, learning_rate=learning_rate, betas=betas, weight_decay=weight_decay)
    return torch.optim.AdamW([group for group in groups if group["params"]], learning_rate, betas, fused=True)
