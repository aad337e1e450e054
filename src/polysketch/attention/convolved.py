"""Linear attention by means over the keys, with a depthwise convolution of the values added to it."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch import ops
from polysketch.attention import in_spans
from polysketch.attention.linearized import LinearizedAttention, widened
from polysketch.attention.span_state import SpanState, causal_linear_attention, sum_tensors
from polysketch.attention.token_convolution import TokenConvolution

MEAN_EPSILON = 1e-6


@dataclass
class ConvolvedState:
    """The state of attention over features, the values the convolution still needs, and the number of keys.

    Attributes:
        attention: sums over the tokens seen.
        tail: (batch, num_kv_heads, size - 1, head_dim), the last values.
        count: (batch,) tokens seen that were not masked, floating: means are sums divided by it.
    """

    attention: ops.LinearAttentionState
    tail: Tensor
    count: Tensor

    @property
    def position(self) -> Tensor:
        """(batch,) int64 in host memory, tokens seen since each row's first real one."""
        return self.attention.position

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: the same at every position."""
        return self.attention.nbytes + sum(x.numel() * x.element_size() for x in (self.tail, self.count))

    def clone(self) -> "ConvolvedState":
        """A copy to roll back to."""
        return ConvolvedState(self.attention.clone(), self.tail.clone(), self.count.clone())

    def reorder(self, indices: Tensor) -> "ConvolvedState":
        """The rows `indices` (int64) of the batch, repeated or dropped as they are named: for beam search."""
        tail, count = (x.index_select(0, indices.to(x.device)) for x in (self.tail, self.count))
        return ConvolvedState(self.attention.reorder(indices), tail, count)


class ConvolvedAttention(LinearizedAttention):
    """o_i = (mean_j w_ij v_j) / (1e-6 + mean_j w_ij) + b + sum_t c_t v_{i + t}.

    Means are over the keys that i sees, masked ones left out: of sums, the 1e-6 is multiplied by the number of keys.

    A subclass sets `feature_map`, and where values are split into parts with weights of their own, `parts` and
    `features_of_parts`.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        convolution_size: taps of the convolution, or of its side on a grid.
        grid: (height, width) of a picture in tokens, row by row, for a two-dimensional convolution; the mechanism is
            then bidirectional only.
        class_tokens: tokens before that picture, such as a class token, which the convolution passes over.

    Attributes:
        parts: parts of equal width into which values are split.
        is_causal: false with a grid.
    """

    parts: int = 1
    is_blockwise = False

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        convolution_size: int,
        grid: tuple[int, int] | None,
        class_tokens: int = 0,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        self.convolution = TokenConvolution(head_dim, convolution_size, grid, class_tokens)
        self.is_causal = grid is None

    @property
    def is_cross(self) -> bool:
        """Values are convolved at the place of each query."""
        return False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = True,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """As `Mechanism.forward`, of as many keys as queries.

        Raises:
            ValueError: `causal` with a grid, or a length that is not the grid's.
        """
        query, key, value, hidden = self.real_inputs(query, key, value, key_mask, hidden)
        self.block_options(block_size)
        self._check_lengths(query, key, causal)
        if causal and (span := in_spans.length_of_a_span(self, query, key, value, hidden)):
            return in_spans.attended(self, query, key, value, span, key_mask=key_mask, hidden=hidden)
        wide = widened(value)
        convolved = self.convolution(wide, causal=causal, key_mask=key_mask)
        operands, options = self._summands(query, key, wide, hidden)
        sums = ops.linear_attention(*operands, causal=causal, key_mask=key_mask, **options).output
        count = _keys_seen(wide, key_mask) if causal else _keys_seen(wide, key_mask)[:, -1:]
        return self.finish(self._means(sums, count, value.shape[3]), convolved, hidden).to(value.dtype)

    def init_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> Any:
        """A `ConvolvedState` of zeros; its size depends on features, head_dim and taps, never on the context.

        Args:
            batch_size, device, dtype: as for `Mechanism.init_state`.
            value_dim: width of the values to come; head_dim when None.

        Raises:
            NotImplementedError: with a grid.
        """
        self._expect_causal()
        value_dim = self.head_dim if value_dim is None else value_dim
        like = self.convolution.weight
        attention = ops.LinearAttentionState.init(
            batch_size,
            self.parts * self.num_kv_heads,
            self.feature_map.feature_dim,
            -(-value_dim // self.parts) + 1,
            device=like.device if device is None else device,
            dtype=like.dtype if dtype is None else dtype,
        )
        tail = attention.sums.new_zeros(batch_size, self.num_kv_heads, like.shape[2] - 1, value_dim)
        return ConvolvedState(attention, tail, attention.sums.new_zeros(batch_size))

    @torch.no_grad()
    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: Any,
        *,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """As `Mechanism.extend`, with a `ConvolvedState`; a token costs the same however many came before."""
        self._expect_causal()
        query, key, value, hidden = self.new_inputs(query, key, value, key_mask, hidden)
        self.block_options(block_size)
        wide = widened(value)
        convolved, tail = self.convolution.extend(wide, state.tail, key_mask=key_mask)
        operands, options = self._summands(query, key, wide, hidden)
        sums = ops.linear_attention_extend_(*operands, state.attention, key_mask=key_mask, **options).output
        count = state.count[:, None] + _keys_seen(wide, key_mask)
        state.tail.copy_(tail)
        state.count.copy_(count[:, -1])
        output = self.finish(self._means(sums, count, value.shape[3]), convolved, hidden)
        return output.to(value.dtype), state

    def init_span(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> SpanState:
        """As `Mechanism.init_span`: sums, and the last values."""
        state = self.init_state(batch_size, device, dtype, value_dim=value_dim)
        return SpanState(0, {**sum_tensors(state.attention), "tail": state.tail})

    def forward_span(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: SpanState,
        *,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, SpanState]:
        """As `Mechanism.forward_span`."""
        self._expect_causal()
        self.check_inputs(query, key, value, hidden)
        wide, sums = widened(value), self.following(state)
        convolved, tail = self.convolution.extend(wide, state.tensors["tail"])
        operands, options = self._summands(query, key, wide, hidden)
        numerators = causal_linear_attention(*operands, sums, **options).output
        count = state.position + _keys_seen(wide, None)
        output = self.finish(self._means(numerators, count, value.shape[3]), convolved, hidden)
        after = SpanState(state.position + value.shape[2], {**sums.tensors(), "tail": tail})
        return output.to(value.dtype), after

    def features_of_parts(self, query_features: Tensor, key_features: Tensor) -> tuple[Tensor, Tensor]:
        """Features with heads for every part: all heads of the first part, then all of the second."""
        return query_features, key_features

    def finish(self, attended: Tensor, convolved: Tensor, hidden: Tensor | None) -> Tensor:
        """The output from the attention (per query head) and the convolution (per key/value head): their sum."""
        return attended + convolved.repeat_interleave(self.num_heads // self.num_kv_heads, 1)

    def _summands(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """The op's operands, parts as heads and with values of one for the sum of weights, and its options."""
        features, options = self.operands(query, key, value.dtype, hidden)
        parts = F.pad(value, (0, -value.shape[3] % self.parts)).chunk(self.parts, -1)
        summed = F.pad(torch.cat(parts, 1), (0, 1), value=1.0)
        return (*self.features_of_parts(*features), summed), {**options, "normalize": False}

    def _means(self, sums: Tensor, count: Tensor, width: int) -> Tensor:
        """The op's sums (batch, parts * num_heads, length, part + 1) -> (batch, num_heads, length, width)."""
        # At padding before the first token nothing is seen, and nothing comes out.
        least = MEAN_EPSILON * count.clamp(min=1)[:, None, :, None]
        means = sums[..., :-1] / (sums[..., -1:] + least)
        return torch.cat(means.chunk(self.parts, 1), -1)[..., :width]

    def _check_lengths(self, query: Tensor, key: Tensor, causal: bool) -> None:
        if causal and not self.is_causal:
            raise ValueError(
                f"{type(self).__name__} with grid={self.convolution.grid} cannot be causal, for its convolution looks "
                "in all directions: pass causal=False, or build it without grid for a sequence"
            )
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                "values are convolved at the place of each query: as many keys as queries are expected, got "
                f"{query.shape[2]} queries and {key.shape[2]} keys"
            )

    def _expect_causal(self) -> None:
        if not self.is_causal:
            raise NotImplementedError(
                f"{type(self).__name__} with grid={self.convolution.grid} cannot decode token by token: it has no state"
            )


def _keys_seen(like: Tensor, key_mask: Tensor | None) -> Tensor:
    """(batch or 1, length): how many of these tokens are real, up to and including each."""
    if key_mask is None:
        return torch.arange(1, like.shape[2] + 1, device=like.device, dtype=like.dtype)[None]
    return key_mask.cumsum(1).to(like.dtype)
