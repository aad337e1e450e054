"""A language model as a function of new tokens and a state of constant size, for tools that trace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polysketch.attention import MECHANISMS, build
from polysketch.attention.traced_state import TracedState
from polysketch.attention.traced_sums import Recurrence, first_tensors
from polysketch.models import TransformerLM
from polysketch.nn.names import SHORT_CONVOLUTION

POSITION = "position"
"""The part of the state that counts tokens."""


@dataclass(frozen=True)
class StatePart:
    """One tensor of the state.

    Attributes:
        name: "position", or the layer's number and the tensor's name there: "0.sums".
        first: its value before the first token, zeros.
    """

    name: str
    first: Tensor


class SpanModel(nn.Module):
    """(ids, position, states) -> (logits, next position, next states): pure, one row, any number of new tokens.

    Within a call all pairs of new tokens are looked at where the mechanism's sums are not given to an operator: long
    prompts are given in spans.

    Args:
        model: a language model; its weights are shared, not copied.
        recurrence: what computes sums over features.

    Raises:
        ValueError: a layer without a state of constant size, by its number and name.

    Attributes:
        parts: the state, in the order of inputs and outputs; `position` (1,) int64 is the first.
    """

    def __init__(self, model: TransformerLM, recurrence: Recurrence | None = None) -> None:
        super().__init__()
        self.model, self.recurrence = model, Recurrence() if recurrence is None else recurrence
        self.parts = [StatePart(POSITION, torch.zeros(1, dtype=torch.int64)), *self._parts()]

    def forward(self, ids: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Read new tokens.

        Args:
            ids: (1, new tokens) int64.
            *state: the tensors of `parts`, after the tokens before.

        Returns:
            Logits (1, vocab_size) of the token after the last one, and the state after it.
        """
        position, tensors = state[0], dict(zip(self.names, state, strict=True))
        length, model = ids.shape[1], self.model
        positions = position + torch.arange(length, device=ids.device)
        hidden, rotation = model.embed_at(ids, positions), model.rotation_of(positions)
        after = {POSITION: position + length}
        for index, block in enumerate(model.blocks):
            own = {name.partition(".")[2]: x for name, x in tensors.items() if name.startswith(f"{index}.")}
            found = TracedState(position[0], own, self.recurrence)
            hidden, found = block.forward_span(hidden, found, rotation)
            after |= {f"{index}.{name}": x for name, x in found.tensors.items()}
        logits = model.logits(model.final_norm(hidden[:, -1]))
        return logits, *(after[name] for name in self.names)

    @property
    def names(self) -> list[str]:
        """Of the state's parts."""
        return [part.name for part in self.parts]

    @torch.no_grad()
    def _parts(self) -> list[StatePart]:
        """What a span leaves: of the tensors that a state begins with, those that are read."""
        model, parts, start = self.model, [], torch.zeros((), dtype=torch.int64)
        hidden = model.embed_at(torch.zeros(1, 1, dtype=torch.int64), start[None])
        for index, block in enumerate(model.blocks):
            try:
                first = first_tensors(block.attention.init_span(1, torch.device("cpu"), torch.float32).tensors)
            except NotImplementedError:
                raise ValueError(_refusal(model, index)) from None
            hidden, found = block.forward_span(hidden, TracedState(start, first))
            parts += [StatePart(f"{index}.{name}", first[name]) for name in found.tensors]
        return parts


def _refusal(model: TransformerLM, index: int) -> str:
    """Why a layer cannot be part of it, and which layers can."""
    name, _ = model.config.layers()[index]
    able = ", ".join([*filter(_has_constant_state, MECHANISMS), SHORT_CONVOLUTION])
    return (
        f"layer {index} is {name}, whose state grows or is not tensors alone: it has no graph; layers that do: {able}"
    )


def _has_constant_state(name: str) -> bool:
    """Whether a mechanism with its own options has a state that is tensors of constant size."""
    try:
        build(name, num_heads=1, head_dim=8).init_span(1)
    except NotImplementedError:
        return False
    return True
