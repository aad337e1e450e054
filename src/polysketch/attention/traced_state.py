"""The state of a span for a tracer: the position is a tensor, so that one graph serves every position."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polysketch.attention.span_state import Following, SpanState
from polysketch.attention.traced_sums import Recurrence, TracedChunks, TracedSums, grouped, places, same_chunk


@dataclass(frozen=True)
class TracedState(SpanState):
    """A `SpanState` whose methods decide nothing in host memory and call no operator of ours, only PyTorch's own.

    Places that no token has taken yet stay in what is kept, and are masked by the position.

    Attributes:
        position: () int64 tensor, tokens before the span, the same in every row.
        tensors: as `first_tensors` gives them.
        recurrence: what computes sums over features.
    """

    position: Any = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    recurrence: Recurrence = field(default_factory=Recurrence)

    def sums(self, *, power: int, factors: int) -> Following:
        """As `SpanState.sums`, in plain PyTorch or by the `recurrence`."""
        if "pending" in self.tensors:
            return TracedChunks(self.tensors, self.position, power=power, factors=factors)
        return TracedSums(self.tensors, self.recurrence, power=power, factors=factors)

    def followed_by(self, name: str, new: Tensor) -> Tensor:
        """All that is kept under `name`, taken places or not, and then new tokens."""
        return torch.cat([self.tensors[name], new], 2)

    def kept_after(self, name: str, new: Tensor) -> Tensor:
        """As `SpanState.kept_after`."""
        return self.followed_by(name, new)[:, :, new.shape[2] :]

    def window_attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """As `SpanState.window_attention`, all weights at once."""
        window, beside = options["window"], options.get("beside")
        behind, of_key = places(query, key)
        seen = (behind >= 0) & (behind < window) & (of_key >= -self.position)
        logits = (grouped(query, key) @ key.mT[:, :, None] * query.shape[3] ** -0.5).masked_fill(~seen, float("-inf"))
        if beside is None:
            return (logits.softmax(-1) @ value[:, :, None]).flatten(1, 2)
        logits = torch.cat([logits, grouped(beside.logit[..., None], key)], -1)
        weights = logits.softmax(-1)
        near = weights[..., : key.shape[2]] @ value[:, :, None]
        return (near + weights[..., key.shape[2] :] * grouped(beside.value, key)).flatten(1, 2)

    def chunk_attention(self, query: Tensor, key: Tensor, value: Tensor, *, chunk: int, **options: Any) -> Tensor:
        """As `SpanState.chunk_attention`, all weights at once."""
        behind, of_key = places(query, key)
        seen = (behind >= 0) & (of_key >= -self.position) & same_chunk(behind, of_key, self.position, chunk)
        weights = (grouped(query, key) @ key.mT[:, :, None]).pow(options["degree"]) * seen
        output = (weights @ value[:, :, None]) / (weights.sum(-1, keepdim=True) + options["offset"])
        return output.flatten(1, 2)
