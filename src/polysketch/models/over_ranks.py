"""A language model over rows that several processes share."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysketch.attention import SpanState, add_spans
from polysketch.distributed import ContextGroup
from polysketch.models.documents_over_ranks import SharedDocuments
from polysketch.models.tiles import Tile
from polysketch.nn import TokenMixer
from polysketch.ops import PackedDocuments
from polysketch.targets import NO_TARGET

if TYPE_CHECKING:
    from polysketch.models.transformer_lm import TransformerLM


def loss_over_ranks(
    model: "TransformerLM",
    ids: Tensor,
    targets: Tensor,
    context: ContextGroup,
    documents: PackedDocuments | None = None,
) -> Tensor:
    """The mean cross-entropy of rows of which this process computes its tiles.

    Args:
        model: on every rank the same.
        ids, targets: (batch, length) int64, whole rows, on every rank the same.
        context: the ranks.
        documents: of a single row, which see nothing of one another; None where a row is one sequence.

    Returns:
        The mean over the tokens of all ranks, the same on each. The gradients of a rank are those that go through its
        own tiles: their sum over the ranks is the gradient of the mean.

    Raises:
        RuntimeError: rows or documents that differ between ranks.
        NotImplementedError: a layer without a state of constant size, by its number and name.
        ValueError: rows that are too short to be cut.
    """
    lengths = torch.tensor([] if documents is None else documents.lengths, dtype=torch.int64, device=ids.device)
    context.check_same("ids, targets and documents", ids, targets, lengths)
    rows = _Rows(model, ids, context) if documents is None else SharedDocuments(model, ids, documents, context)
    for layer, before in enumerate(model.init_spans(ids.shape[0])):
        rows.run(layer, before)
    count = (targets != NO_TARGET).sum()
    return context.total([each / count for each in rows.losses(targets)])


class _Rows:
    """Rows on their way through the layers: what this process holds of them.

    Attributes:
        cut: where its tiles begin and end.
        tiles: the model for each of them.
        hidden: (batch, tokens of the tile, hidden_size) of each.
    """

    def __init__(self, model: "TransformerLM", ids: Tensor, context: ContextGroup) -> None:
        self._model, self._context, self._plan = model, context, context.plan(ids.shape[1])
        self.cut = self._plan.of_rank(context.rank)
        self.tiles = [Tile(model, weights) for weights in context.weights(model)]
        begun = [tile.run("begin_span", ids[:, each], each.start) for tile, each in self._pairs()]
        self.hidden, self._rotations = [each[0] for each in begun], [each[1] for each in begun]

    def adds_up(self, layer: int) -> bool:
        """Whether what each tile gives alone is enough, wherever one begins."""
        mixer, edges = self._mixer(layer), self._plan.edges
        shortest = min(stop - start for start, stop in pairwise(edges))
        return shortest >= mixer.halo and all(mixer.adds_up(edge) for edge in edges[:-1])

    def run(self, layer: int, before: SpanState) -> None:
        """A layer, given the state before the first token."""
        if self.adds_up(layer):
            self.run_by_sums(layer, before)
        else:
            self.run_in_order(layer, before)

    def losses(self, targets: Tensor) -> list[Tensor]:
        """Of each tile of this process, the sum of its tokens' losses; targets (batch, length) of the whole rows."""
        every = zip(self.tiles, self.hidden, self.cut, strict=True)
        return [tile.run("end_span", hidden, targets[:, each]).sum() for tile, hidden, each in every]

    def run_in_order(self, layer: int, before: SpanState) -> None:
        """Every tile after the one before it, whose state it is given: from rank to rank in messages."""
        self.hidden[0], tensors = self._context.receive(self.hidden[0], list(before.tensors.values()))
        state = SpanState(self.cut[0].start, dict(zip(before.tensors, tensors, strict=True)))
        for number, tile in enumerate(self.tiles):
            inputs = (self.hidden[number], state, self._rotations[number])
            self.hidden[number], state = tile.run_block(layer, "forward_span", *inputs)
        self.hidden[-1] = self._context.send(self.hidden[-1], [state.tensors[name] for name in before.tensors])

    def run_by_sums(self, layer: int, before: SpanState) -> None:
        """What every tile adds, then all that comes before each by one collective, then all tiles with that."""
        states = [before.at(each.start).joined(halo) for each, halo in zip(self.cut, self._halos(layer), strict=True)]
        own = [
            tile.run_block(layer, "span_sums", *inputs)
            for tile, *inputs in zip(self.tiles, self.hidden, states, self._rotations, strict=True)
        ]
        summed = self._context.before_each([list(each.values()) for each in own], add_spans)
        states = [
            state.joined(dict(zip(own[0], each, strict=True))) for state, each in zip(states, summed, strict=True)
        ]
        self.hidden = [
            tile.run_block(layer, "forward_span", *inputs)[0]
            for tile, *inputs in zip(self.tiles, self.hidden, states, self._rotations, strict=True)
        ]

    def _halos(self, layer: int) -> list[dict[str, Tensor]]:
        """What each tile's state has of the last tokens before it; nothing for the first of all."""
        size = self._mixer(layer).halo
        if not size:
            return [{} for _ in self.tiles]
        last = [hidden[:, -size:] for hidden in self.hidden]
        self.hidden[-1] = self._context.send(self.hidden[-1], [last[-1]])
        self.hidden[0], first = self._context.receive(self.hidden[0], [torch.zeros_like(last[0])])
        halos = [
            tile.run_block(layer, "halo_tensors", hidden)
            for tile, hidden in zip(self.tiles, [*first, *last[:-1]], strict=True)
        ]
        return [{}, *halos[1:]] if self._context.is_first else halos

    def _mixer(self, layer: int) -> TokenMixer:
        return self._model.blocks[layer].attention  # type: ignore[return-value]

    def _pairs(self) -> Any:
        return zip(self.tiles, self.cut, strict=True)
