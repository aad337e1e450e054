"""What one span of a sequence leaves to the next one, as values that gradients pass through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch import ops
from polysketch.ops.local_softmax import RemainingSums, local_softmax_attention

SUMMED = ("sums", "normalizer", "log_decay")
"""Tensors of a state of attention over features that add up over spans."""


@dataclass(frozen=True)
class SpanState:
    """Everything that a span needs of the tokens before it, of a size that does not depend on their number.

    Attributes:
        position: tokens before the span, the same in every row.
        tensors: by name, each (batch, ...).
    """

    position: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def at(self, position: int) -> "SpanState":
        """The same tensors before a span that begins at `position`."""
        return SpanState(position, self.tensors)

    def joined(self, tensors: Mapping[str, Tensor]) -> "SpanState":
        """The same state with other tensors under some of its names, in the dtypes of its own."""
        own = {name: tensor.to(self.tensors[name].dtype) for name, tensor in tensors.items()}
        return SpanState(self.position, {**self.tensors, **own})

    def detach(self) -> "SpanState":
        """The same numbers, through which no gradient passes."""
        return SpanState(self.position, {name: tensor.detach() for name, tensor in self.tensors.items()})

    def followed_by(self, name: str, new: Tensor) -> Tensor:
        """The tokens that are kept under `name`, those there are, and then new ones (batch, heads, length, width)."""
        kept = self.tensors[name]
        seen = min(self.position, kept.shape[2])
        return torch.cat([kept[:, :, kept.shape[2] - seen :].to(new.dtype), new], 2)

    def sums(self, *, power: int, factors: int) -> "Following":
        """The sums over features among the tensors, to move on; power and factors of the features."""
        return Following(sums_of(self, power=power, factors=factors))

    def window_attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """`ops.sliding_window_attention_with_cache` of new queries, over what `followed_by` gives of keys and values.

        Args:
            query: (batch, heads, new tokens, head_dim).
            key, value: (batch, key_heads, tokens, width).
            **options: `window` and `beside`, as there.
        """
        return ops.sliding_window_attention_with_cache(query, key, value, **options)

    def chunk_attention(self, query: Tensor, key: Tensor, value: Tensor, *, chunk: int, **options: Any) -> Tensor:
        """Causal `ops.local_attention` of new queries, over what `followed_by` gives of keys and values.

        It begins at the boundary of their chunk, with queries of zeros for its tokens before them.

        Args:
            query, key, value: as for `window_attention`.
            chunk: tokens of a chunk.
            **options: `degree` and `offset`, as there.
        """
        opened = self.position % chunk
        key, value = (x[:, :, x.shape[2] - query.shape[2] - opened :] for x in (key, value))
        query = F.pad(query, (0, 0, opened, 0))
        return ops.local_attention(query, key, value, chunk=chunk, causal=True, **options)[:, :, opened:]

    def kept_after(self, name: str, new: Tensor) -> Tensor:
        """What is kept under `name` after new tokens: the last ones, as many as were kept before."""
        kept = self.tensors[name]
        capacity, length = kept.shape[2], new.shape[2]
        if length >= capacity:
            return new[:, :, length - capacity :].to(kept.dtype, copy=True)  # a view would keep all of `new` alive
        return torch.cat([kept[:, :, length:], new.to(kept.dtype)], 2)


class Following:
    """Sums before a span, in whose place stand those after it once they have been attended to.

    Attributes:
        state: treated as a value.
    """

    def __init__(self, state: ops.LinearAttentionState) -> None:
        self.state, self._before = state, state

    def attend(
        self, query_features: Tensor, key_features: Tensor, value: Tensor, **options: Any
    ) -> ops.LinearAttentionResult:
        """Causal `ops.linear_attention` of the span, with gradients; arguments as there."""
        tensors = (query_features, key_features, value)
        found = ops.linear_attention(*tensors, causal=True, state=self.state, return_state=True, **options)
        assert found.state is not None
        self.state = found.state
        return found

    def recall(
        self, query_features: Tensor, key_features: Tensor, value: Tensor, strength: Tensor, *, factors: int
    ) -> Tensor:
        """What the sums answer each query once its token is written by the delta rule, as `ops.delta_attention`."""
        written = ops.delta_writes(key_features, value, strength, factors=factors, state=self.state)
        operands = (query_features.to(written.dtype), key_features.to(written.dtype), written)
        return self.attend(*operands, factors=factors, normalize=False).output

    def softmax_in_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, remaining: RemainingSums, *, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Causal `local_softmax_attention` of the span, behind the chunk that was open before it."""
        opened = ops.OpenChunk(self._before.open_key, self._before.open_value, self._before.position)
        return local_softmax_attention(query, key, value, remaining, chunk=chunk, causal=True, opened=opened)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the sums, by name, without the positions."""
        return sum_tensors(self.state)


def causal_linear_attention(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    state: ops.LinearAttentionState | ops.StateRows | Following | None,
    **options: Any,
) -> ops.LinearAttentionResult:
    """Causal `ops.linear_attention` of a whole sequence, of a span of one, or of new tokens in decoding.

    Args:
        query_features, key_features, value: as there.
        state: None for a whole sequence; a `Following`, which moves on and through which gradients pass; or an
            `ops.LinearAttentionState` or rows of one, which moves on in place, without gradients.
        **options: of the op.
    """
    tensors = (query_features, key_features, value)
    if state is None:
        return ops.linear_attention(*tensors, causal=True, **options)
    if isinstance(state, Following):
        return state.attend(*tensors, **options)
    return ops.linear_attention_extend_(*tensors, state, **options)


def add_spans(before: Sequence[Tensor], own: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of `Mechanism.span_sums` of two spans in a row.

    Args:
        before: sums (batch, heads, e, width), normalizer (batch, heads, e) and log decay (batch, heads) of the first.
        own: of the second.

    Raises:
        ValueError: other than three tensors of a span.
    """
    if len(before) != 3 or len(own) != 3:
        raise ValueError(f"expected sums, normalizer and log decay of each span, found {len(before)} and {len(own)}")
    (sums, normalizer, decay), (own_sums, own_normalizer, own_decay) = before, own
    left = own_decay.exp()
    return [sums * left[..., None, None] + own_sums, normalizer * left[..., None] + own_normalizer, decay + own_decay]


def sum_tensors(state: ops.LinearAttentionState) -> dict[str, Tensor]:
    """The tensors of sums, by name, without the positions."""
    return {name: tensor for name, tensor in state.tensors().items() if name != "position"}


def sums_of(state: SpanState, *, power: int, factors: int) -> ops.LinearAttentionState:
    """The sums among the tensors of a span's state."""
    names = ("sums", "normalizer", "log_decay", "open_features", "open_value", "open_key", "open_log_decay")
    tensors = {name: state.tensors[name] for name in names}
    position = torch.full((tensors["sums"].shape[0],), state.position, device="cpu")
    return ops.LinearAttentionState(**tensors, position=position, power=power, factors=factors)
