"""What mechanisms share whose state is keys and values themselves: all of them, or the last ones."""

from typing import Any

import torch
from torch import Tensor, nn

from polysketch.attention.base import Mechanism
from polysketch.attention.heads import require_as_many
from polysketch.attention.key_value_state import KeyValueRows, KeyValueState
from polysketch.attention.recent_tokens import RecentTokens
from polysketch.attention.source import KeptSource
from polysketch.attention.span_state import SpanState
from polysketch.ops.arguments import check_attention_tensors


class KeptTokensAttention(Mechanism):
    """Attention to keys and values themselves, not to features of them. A subclass gives `attend`.

    Attributes:
        query_norm, key_norm: layer norms of queries and keys, which a subclass may set; None for none.
    """

    query_norm: nn.LayerNorm | None
    key_norm: nn.LayerNorm | None

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int | None = None) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        self.query_norm = None
        self.key_norm = None

    def prepare_query(self, query: Tensor, dtype: torch.dtype) -> Tensor:
        """The query as it meets the keys: as it is, or normed and in `dtype`."""
        return query if self.query_norm is None else self.query_norm(query).to(dtype)

    def prepare_key(self, key: Tensor, dtype: torch.dtype) -> Tensor:
        """The key as it is kept: as it is, or normed and in `dtype`."""
        return key if self.key_norm is None else self.key_norm(key).to(dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, key_mask: Tensor | None) -> Tensor:
        """The output of a whole sequence, from prepared queries and keys; where `is_blockwise`, with a `block_size`."""
        raise NotImplementedError(f"{type(self).__name__} has no formula")

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
        """As `Mechanism.forward`; `hidden` is ignored."""
        query, key, value, _ = self.real_inputs(query, key, value, key_mask)
        blocks = self.block_options(block_size)
        query, key = self.prepare_query(query, value.dtype), self.prepare_key(key, value.dtype)
        return self.attend(query, key, value, causal=causal, key_mask=key_mask, **blocks)

    @torch.no_grad()
    def read_source(self, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> Any:
        """As `Mechanism.read_source`: keys are prepared once.

        Args:
            key, value, key_mask: as there.
        """
        self.require_cross()
        key, value = self.real_source(key, value, key_mask)
        return KeptSource(self.prepare_key(key, value.dtype), value, key_mask)

    @torch.no_grad()
    def ask_source(self, query: Tensor, source: KeptSource) -> Tensor:
        """As `Mechanism.ask_source`.

        Args:
            query, source: as there.
        """
        self.check_query(query)
        key, value = source.key, source.value
        prepared = self.prepare_query(query, value.dtype)
        return self.attend(prepared, key, value, causal=False, key_mask=source.key_mask).to(query.dtype)


class AllTokensAttention(KeptTokensAttention):
    """Attention whose state is every key and value; a subclass gives `attend_to_cache` too."""

    def attend_to_cache(self, query: Tensor, keys: Tensor, values: Tensor, *, key_mask: Tensor | None) -> Tensor:
        """The output of the last tokens: prepared queries, and all prepared keys and values so far; as `attend`."""
        raise NotImplementedError(f"{type(self).__name__} has no formula")

    def init_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> Any:
        """An empty `KeyValueState` of prepared keys and of values."""
        return KeyValueState(batch_size, device, dtype)

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
        """As `Mechanism.extend`; a new token costs one product with every stored key and value.

        The rows of `KeyValueRows` are attended one after the other, each to as many keys as it has.
        """
        query, key, value, _ = self.new_inputs(query, key, value, key_mask)
        blocks, key = self._blocks_after(state, block_size), self.prepare_key(key, value.dtype)
        if not isinstance(state, KeyValueRows):
            return self._extend_prepared(query, key, value, state, key_mask, blocks), state
        new = (query.split(1), key.split(1), value.split(1))
        masks = [None] * len(state.rows) if key_mask is None else key_mask.split(1)
        rows = zip(*new, state.rows, masks, strict=True)
        return torch.cat([self._extend_prepared(*row, blocks) for row in rows]), state

    def _extend_prepared(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: KeyValueState,
        key_mask: Tensor | None,
        blocks: dict[str, Any],
    ) -> Tensor:
        """The output of new tokens whose keys are prepared."""
        keys, values, mask = state.append(key, value, key_mask)
        query = self.prepare_query(query, keys.dtype).to(keys.dtype)
        return self.attend_to_cache(query, keys, values, key_mask=mask, **blocks).to(value.dtype)


class RecentTokensAttention(KeptTokensAttention):
    """Attention whose state is the last keys and values; a subclass gives `reach` and three more formulas."""

    @property
    def reach(self) -> int:
        """As `Mechanism.reach`: the tokens of a row to keep."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many tokens it keeps")

    @property
    def is_cross(self) -> bool:
        """The tokens nearby are those around the query's own place."""
        return False

    def attend_to_kept(self, query: Tensor, key: Tensor, value: Tensor, state: RecentTokens) -> Tensor:
        """The output of one token of every row, which the state holds already."""
        raise NotImplementedError(f"{type(self).__name__} has no formula")

    def attend_after_kept(
        self, query: Tensor, key: Tensor, value: Tensor, state: RecentTokens, key_mask: Tensor | None
    ) -> Tensor:
        """The output of tokens that follow those of the state, which does not hold them yet; as `attend`."""
        raise NotImplementedError(f"{type(self).__name__} has no formula")

    def attend_behind(self, query: Tensor, keys: Tensor, values: Tensor, state: SpanState) -> Tensor:
        """The output of prepared queries, the last of those of `keys`, which are kept in `state` or follow them."""
        raise NotImplementedError(f"{type(self).__name__} has no formula")

    def init_span(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> SpanState:
        """As `Mechanism.init_span`: the last prepared keys and values, zeros where there are none yet."""
        like = self.own_tensor
        device, dtype = like.device if device is None else device, like.dtype if dtype is None else dtype
        widths = {"key": self.head_dim, "value": self.head_dim if value_dim is None else value_dim}
        shape = (batch_size, self.num_kv_heads, self.reach)
        zeros = {name: torch.zeros(*shape, width, device=device, dtype=dtype) for name, width in widths.items()}
        return SpanState(0, zeros)

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
        self.check_inputs(query, key, value)
        require_as_many(query, key)
        query, key = self.prepare_query(query, value.dtype), self.prepare_key(key, value.dtype)
        new = {"key": key, "value": value}
        keys, values = (state.followed_by(name, x) for name, x in new.items())
        output = self.attend_behind(query.to(keys.dtype), keys, values, state)
        kept = {name: state.kept_after(name, x) for name, x in new.items()}
        return output.to(value.dtype), SpanState(state.position + value.shape[2], kept)

    def init_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> RecentTokens:
        """Room for the last prepared keys and values."""
        return RecentTokens(batch_size, self.reach, device, dtype)

    @torch.no_grad()
    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: RecentTokens,
        *,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, RecentTokens]:
        """As `Mechanism.extend`; a new token costs one product with the keys and values that are kept."""
        query, key, value, _ = self.new_inputs(query, key, value, key_mask)
        if state.capacity != self.reach:
            raise ValueError(f"the state keeps {state.capacity} tokens, this mechanism reaches {self.reach}")
        blocks = self._blocks_after(state, block_size)
        query, key = self.prepare_query(query, value.dtype), self.prepare_key(key, value.dtype)
        if value.dtype != query.dtype:  # refused, if so, before the state moves on
            check_attention_tensors(query, key, value)
        if query.shape[2] == 1:
            state.append(key, value, key_mask)
            output = self.attend_to_kept(query, key, value, state)
        else:
            output = self.attend_after_kept(query, key, value, state, key_mask, **blocks)
            state.append(key, value, key_mask)
        return output.to(value.dtype), state
