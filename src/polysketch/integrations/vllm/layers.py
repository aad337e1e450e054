"""The blocks of a model for the requests of a step, each of which has its own past."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from polysketch.integrations.vllm.rows import Rows
from polysketch.integrations.vllm.slots import StateSlots
from polysketch.models import TransformerLM
from polysketch.nn import Rotation, TransformerBlock
from polysketch.nn.projection_convolution import ProjectionConvolution

RowsOfStep = Callable[[], "list[Rows] | None"]
"""Gives the requests of the step that runs now; None in a run that only measures memory."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value), each (tokens, heads * head_dim) -> (tokens, heads * head_dim); keeps keys and values itself."""


class Layer(Protocol):
    """A block that finds the past of its tokens by itself."""

    def __call__(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """(tokens, hidden_size) and the rotation of each token's position -> (tokens, hidden_size)."""


@torch.no_grad()
def run_step(model: TransformerLM, layers: Sequence[Layer], ids: Tensor, positions: Tensor) -> Tensor:
    """New tokens of many requests through a model.

    Args:
        model: whose blocks `layers` are of.
        layers: from `StateLayer` and `SoftmaxLayer`.
        ids: (tokens,) int64, of one request after the other.
        positions: (tokens,) int64, of each in its request.

    Returns:
        (tokens, hidden_size) after the final norm.
    """
    hidden, rotation = model.embed_at(ids[None], positions[None])[0], model.rotation_of(positions)
    for layer in layers:
        hidden = layer(hidden, rotation)
    return model.final_norm(hidden)


@dataclass(frozen=True)
class StateLayer:
    """A block whose mechanism has a state of constant size.

    Attributes:
        block: the block.
        slots: the states of all requests, from `state_slots`.
        rows: the requests of a step.
    """

    block: TransformerBlock
    slots: StateSlots
    rows: RowsOfStep

    def __call__(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """As `Layer`: requests with as many new tokens as one another are a batch of `TransformerBlock.extend`."""

        def extend(rows: Rows, state: Any) -> tuple[Tensor, Any]:
            return self.block.extend(rows.of(hidden), state, _rotation_of(rows, rotation))

        return for_each_rows(self.slots, self.rows(), hidden, extend)


@dataclass(frozen=True)
class SoftmaxLayer:
    """A block of softmax attention, whose keys and values the server keeps.

    Attributes:
        block: the block.
        attend: the server's attention.
        tails: the last projections of each request, from `tail_slots`; None where projections are not convolved.
        rows: the requests of a step.
    """

    block: TransformerBlock
    attend: Attend
    tails: StateSlots | None
    rows: RowsOfStep

    def __call__(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """As `Layer`: everything but the convolution is of all tokens at once."""
        block, layer = self.block, self._attention
        normalized = block.attention_norm(hidden)
        projected = self._convolved(layer.query_key_value(normalized))[None]
        query, key, value, _ = layer.heads(projected, rotation if block.rotary else None, normalized[None])
        attended = self.attend(*(x[0].transpose(0, 1).flatten(1) for x in (query, key, value)))
        attended = attended.unflatten(1, query.shape[1::2]).transpose(0, 1)[None]
        hidden = hidden + layer.finish(attended, normalized[None])[0]
        return hidden + block.feedforward(block.feedforward_norm(hidden))

    @property
    def _attention(self) -> Any:
        return self.block.attention

    def _convolved(self, projected: Tensor) -> Tensor:
        if self.tails is None:
            return projected

        def extend(rows: Rows, state: Tail) -> tuple[Tensor, Tail]:
            new, state.tail = self._attention.convolution(rows.of(projected), tail=state.tail)
            return new, state

        return for_each_rows(self.tails, self.rows(), projected, extend)


def for_each_rows(
    slots: StateSlots, step: list[Rows] | None, tokens: Tensor, extend: Callable[[Rows, Any], tuple[Tensor, Any]]
) -> Tensor:
    """What `extend` gives for the requests of a step, in the place of their tokens; their states move on.

    Args:
        slots: of the states.
        step: the requests; None stands for a single one that is not kept.
        tokens: (tokens, width), like what is given back.
        extend: (rows, their state) -> (requests, new tokens, width) and the state after them.
    """
    if step is None:
        alone = Rows(0, len(tokens), [0], torch.zeros(1, dtype=torch.int64, device="cpu"))
        return extend(alone, slots.fresh(1))[0].flatten(0, 1)
    found = torch.zeros_like(tokens)  # a step may be filled up to a size
    for rows in step:
        state = slots.fresh(len(rows.pages)) if rows.is_fresh else slots.read(rows.pages, rows.position)
        new, state = extend(rows, state)
        slots.write(rows.pages, state)
        found[rows.tokens] = new.flatten(0, 1)
    return found


def state_slots(block: TransformerBlock) -> StateSlots:
    """Slots for the states of a block, in the dtype and on the device of its weights.

    Raises:
        ValueError: a state that grows with the tokens.
    """
    like = block.attention_norm.weight

    @torch.no_grad()
    def move_on(state: Any, tokens: int) -> Any:
        return block.attention.extend(like.new_zeros(1, tokens, len(like)), state)[1]

    return StateSlots(partial(block.attention.init_state, device=like.device, dtype=like.dtype), move_on)


def tail_slots(convolution: ProjectionConvolution) -> StateSlots:
    """Slots for the last projections before a convolution, in the dtype and on the device of its filter."""
    return StateSlots(lambda rows: Tail(convolution.init_tail(rows)), lambda tail, tokens: tail)


@dataclass
class Tail:
    """The last projections of some requests.

    Attributes:
        tail: as of `ProjectionConvolution`.
    """

    tail: Tensor


def _rotation_of(rows: Rows, rotation: Rotation) -> Rotation:
    """(requests, 1, new tokens, head_dim / 2) of (tokens, head_dim / 2)."""
    cos, sin = (rows.of(x)[:, None] for x in rotation)
    return Rotation(cos, sin)
