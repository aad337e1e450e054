"""A language model over rows that several processes share."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from polysketch.attention import SpanState
from polysketch.distributed import ContextGroup, copies
from polysketch.models.cross_entropy import IGNORED_TARGET

if TYPE_CHECKING:
    from polysketch.models.transformer_lm import TransformerLM


def loss_over_ranks(model: "TransformerLM", ids: Tensor, targets: Tensor, context: ContextGroup) -> Tensor:
    """The mean cross-entropy of rows of which this process computes its tiles.

    Args:
        model: on every rank the same.
        ids, targets: (batch, length) int64, whole rows, on every rank the same.
        context: the ranks.

    Returns:
        The mean over the tokens of all ranks, the same on each. The gradients of a rank are those that go through its
        own tiles: their sum over the ranks is the gradient of the mean.

    Raises:
        RuntimeError: rows that differ between ranks.
        NotImplementedError: a layer without a state of constant size, by its number and name.
        ValueError: rows that are too short to be cut.
    """
    context.check_same("ids and targets", ids, targets)
    cut = context.plan(ids.shape[1]).of_rank(context.rank)
    before = [state.at(cut[0].start) for state in model.init_spans(ids.shape[0])]
    own = copies(model, len(cut)) if len(cut) > 1 else [None]
    tiles = [_Tile(model, weights) for weights in own]
    begun = [tile.run("begin_span", ids[:, each], each.start) for tile, each in zip(tiles, cut, strict=True)]
    hidden, rotations = [each[0] for each in begun], [each[1] for each in begun]
    for layer, first in enumerate(before):
        hidden[0], tensors = context.receive(hidden[0], list(first.tensors.values()))
        state = SpanState(first.position, dict(zip(first.tensors, tensors, strict=True)))
        for number, tile in enumerate(tiles):
            hidden[number], state = tile.run_block(layer, hidden[number], state, rotations[number])
        hidden[-1] = context.send(hidden[-1], [state.tensors[name] for name in first.tensors])
    count = (targets != IGNORED_TARGET).sum()
    losses = [
        tile.run("end_span", last, targets[:, each]).sum() / count
        for tile, last, each in zip(tiles, hidden, cut, strict=True)
    ]
    return context.total(losses)


class _Tile:
    """A model for one tile of the rows, with weights of its own, or with the model's where they are None."""

    def __init__(self, model: "TransformerLM", weights: dict[str, Tensor] | None) -> None:
        self._model, self._weights = model, weights

    def run(self, method: str, *arguments: Any) -> Any:
        """A method of the model."""
        return self._call(self._model, "", method, *arguments)

    def run_block(self, layer: int, *arguments: Any) -> Any:
        """A block's `forward_span`, its inside computed again in the backward pass where the model asks for that."""
        call = (self._model.blocks[layer], f"blocks.{layer}.", "forward_span", *arguments)
        if self._model.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(self._call, *call, use_reentrant=False)
        return self._call(*call)

    def _call(self, module: nn.Module, prefix: str, method: str, *arguments: Any) -> Any:
        if self._weights is None:
            return getattr(module, method)(*arguments)
        own = {
            f"module.{name.removeprefix(prefix)}": weight
            for name, weight in self._weights.items()
            if name.startswith(prefix)
        }
        return functional_call(_Method(module, method), own, arguments)


class _Method(nn.Module):
    """A method of a module, to be called with other weights."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module, self._method = module, method

    def forward(self, *arguments: Any) -> Any:
        """The method's own result."""
        return getattr(self.module, self._method)(*arguments)
