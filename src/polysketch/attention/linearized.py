"""What all attention over features is: a feature map, one op, and a state of constant size."""

from typing import Any

import torch
from torch import Tensor

from polysketch import ops
from polysketch.attention import in_spans
from polysketch.attention.base import Mechanism
from polysketch.attention.redrawn import RedrawnFeatures
from polysketch.attention.span_state import (
    SUMMED,
    Following,
    SpanState,
    causal_linear_attention,
    sum_tensors,
)
from polysketch.ops.linear.decode import why_not_captured


class LinearizedAttention(RedrawnFeatures):
    """o_i = sum_j w_ij v_j / (offset + sum_j w_ij), w_ij = (phi_q(q_i) . phi_k(k_j))^power; linear in the length.

    A subclass sets `feature_map`, and overrides `operands` where there is more to it than that.

    Attributes:
        feature_map: phi and its power.
        redraw_interval: as for `RedrawnFeatures`.
        offset: added to the denominator.
        normalize: false leaves out the denominator.
        local_chunk: tokens of a chunk with exact weights, if there are any.
        is_wide: whether features and values are float32 inside, whatever the inputs: for maps whose features cancel in
            a weight, which half precision would not survive.
    """

    is_blockwise = True
    offset: float = 0.0
    normalize: bool = True
    local_chunk: int | None = None
    is_wide: bool = False

    def operands(
        self, query: Tensor, key: Tensor, dtype: torch.dtype, hidden: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Query and key features in `dtype` (autocast may give maps another), and the options of the op."""
        query_features, key_features = self.feature_map.map_both(query, key)
        powers = {"power": self.feature_map.power, "factors": self.feature_map.factors}
        options = {**powers, "offset": self.offset, "normalize": self.normalize}
        return (query_features.to(dtype), key_features.to(dtype)), options

    def wide(self, value: Tensor) -> Tensor:
        """Values in the dtype that the op takes, which features have too."""
        return widened(value) if self.is_wide else in_range(value)

    def why_not_sums_in(self, dtype: torch.dtype) -> str | None:
        """As `Mechanism.why_not_sums_in`: sums to which whole chunks are added, of a wide range."""
        if self.local_chunk is None:
            return sums_of_single_tokens(self)
        if dtype == torch.float16:
            return f"{type(self).__name__} has weights beyond the range of float16: its sums can be in bfloat16"
        return None

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
        """As `Mechanism.forward`."""
        query, key, value, hidden = self.real_inputs(query, key, value, key_mask, hidden)
        if causal and block_size is None and (span := in_spans.length_of_a_span(self, query, key, value, hidden)):
            return in_spans.attended(self, query, key, value, span, key_mask=key_mask, hidden=hidden)
        wide = self.wide(value)
        features, options = self.operands(query, key, wide.dtype, hidden)
        options |= self.block_options(block_size)
        output = ops.linear_attention(*features, wide, causal=causal, key_mask=key_mask, **options).output
        return output.to(value.dtype)

    def why_not_blocks(self, block_size: int) -> str | None:
        """As `Mechanism.why_not_blocks`: blocks and local chunks must not cut one another."""
        chunk = self.local_chunk
        if chunk is None or block_size % chunk == 0 or chunk % block_size == 0 or not self.is_blockwise:
            return super().why_not_blocks(block_size)
        return f"block_size must divide local_chunk or be a multiple of it, got {block_size} and {chunk}"

    def init_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> ops.LinearAttentionState:
        """Sums of zero; their size depends on features, head_dim and local_chunk, never on the context.

        Args:
            batch_size, device, dtype: as for `Mechanism.init_state`.
            value_dim: width of the values to come; head_dim when None.
        """
        like = self.own_tensor
        return ops.LinearAttentionState.init(
            batch_size,
            self.num_kv_heads,
            self.feature_map.feature_dim,
            self.head_dim if value_dim is None else value_dim,
            power=self.feature_map.power,
            factors=self.feature_map.factors,
            local_chunk=self.local_chunk or 0,
            local_dim=self.head_dim if self.local_chunk else 0,
            device=like.device if device is None else device,
            dtype=like.dtype if dtype is None else dtype,
            sums_dtype=self.sums_dtype,
        )

    @torch.no_grad()
    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: ops.LinearAttentionState,
        *,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, ops.LinearAttentionState]:
        """As `Mechanism.extend`; the cost of a token does not depend on how many came before."""
        query, key, value, hidden = self.new_inputs(query, key, value, key_mask, hidden)
        wide = self.wide(value)
        features, options = self.operands(query, key, wide.dtype, hidden)
        options |= self.block_options(block_size)
        output = ops.linear_attention_extend_(*features, wide, state, key_mask=key_mask, **options).output
        return output.to(value.dtype), state

    def init_span(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> SpanState:
        """As `Mechanism.init_span`: the tensors of `init_state`."""
        return SpanState(0, sum_tensors(self.init_state(batch_size, device, dtype, value_dim=value_dim)))

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
        self.check_inputs(query, key, value, hidden)
        wide, sums = self.wide(value), self.following(state)
        features, options = self.operands(query, key, wide.dtype, hidden)
        output = causal_linear_attention(*features, wide, sums, **options).output
        return output.to(value.dtype), SpanState(state.position + value.shape[2], sums.tensors())

    def alike_position(self, position: int) -> int:
        """As `Mechanism.alike_position`: sums are alike at every place, local chunks at the same place in a chunk."""
        if type(self).forward_span is not LinearizedAttention.forward_span:
            return position
        chunk = self.local_chunk or 1
        return position if position < chunk else chunk + position % chunk

    def adds_up(self, position: int) -> bool:
        """As `Mechanism.adds_up`: at the boundaries of local chunks."""
        own = type(self).forward_span is LinearizedAttention.forward_span
        return own and (not self.local_chunk or position % self.local_chunk == 0)

    def span_sums(
        self, query: Tensor, key: Tensor, value: Tensor, *, hidden: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As `Mechanism.span_sums`."""
        self.check_inputs(query, key, value, hidden)
        wide = self.wide(value)
        (_, key_features), options = self.operands(query, key, wide.dtype, hidden)
        options = {name: options[name] for name in ("power", "factors", "log_decay") if name in options}
        return dict(zip(SUMMED, ops.linear_attention_sums(key_features, wide, **options), strict=True))

    def following(self, state: SpanState) -> Following:
        """The sums of a span's state, to move on."""
        return state.sums(power=self.feature_map.power, factors=self.feature_map.factors)

    @property
    def is_cross(self) -> bool:
        """Without chunks of tokens, which queries and keys would have to share."""
        return self.is_bidirectional and self.local_chunk is None

    @torch.no_grad()
    def read_source(self, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> Any:
        """As `Mechanism.read_source`: sums over the source, of a size that does not depend on its length.

        Args:
            key, value, key_mask: as there.
        """
        self.require_cross()
        key, value = self.real_source(key, value, key_mask)
        wide = self.wide(value)
        nobody = key.new_zeros(key.shape[0], self.num_heads, *key.shape[2:])
        (query_features, key_features), options = self.operands(nobody, key, wide.dtype, None)
        state = self.init_state(key.shape[0], key.device, value.dtype, value_dim=value.shape[3])
        ops.linear_attention_extend_(
            torch.zeros_like(query_features), key_features, wide, state, key_mask=key_mask, **options
        )
        return state

    @torch.no_grad()
    def ask_source(self, query: Tensor, source: ops.LinearAttentionState) -> Tensor:
        """As `Mechanism.ask_source`, by the sums alone: keys without features stand where none are given.

        Args:
            query, source: as there.
        """
        self.check_query(query)
        nothing = query.new_zeros(query.shape[0], self.num_kv_heads, *query.shape[2:])
        wide = source.sums.dtype
        (query_features, key_features), options = self.operands(query, nothing, wide, None)
        value = source.sums.new_zeros(*nothing.shape[:3], source.sums.shape[3])
        silent = torch.zeros_like(key_features)
        found = ops.linear_attention(query_features, silent, value, causal=True, state=source, **options).output
        return found.to(query.dtype)

    def why_not_captured(self, state: ops.LinearAttentionState) -> str | None:
        """As `Mechanism.why_not_captured`; a subclass with an `extend` of its own speaks for itself."""
        if type(self).extend is not LinearizedAttention.extend:
            return super().why_not_captured(state)
        return why_not_captured(state)


def widened(x: Tensor) -> Tensor:
    """In float32 at least: for features that half precision cannot hold, and values to go with them in one dtype.

    Raises:
        TypeError: whole numbers, which would come back as rounded ones.
    """
    if not x.is_floating_point():
        raise TypeError(f"query, key and value must be floating point, got {x.dtype}")
    return x.to(torch.promote_types(x.dtype, torch.float32))


def in_range(value: Tensor) -> Tensor:
    """float16 as float32: features leave its range, and the op takes features and values of one dtype."""
    return value.float() if value.dtype == torch.float16 else value


def sums_of_single_tokens(mechanism: Mechanism) -> str:
    """Why such a mechanism refuses sums in half precision: after 1,024 tokens they are wrong by a fifth."""
    return f"{type(mechanism).__name__} adds token by token to its sums, whose roundings add up: they stay in float32"
