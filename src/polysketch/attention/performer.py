"""Performer attention (FAVOR+): softmax attention estimated by positive random features."""

from typing import Any, Literal

import torch
from torch import Tensor

from polysketch import ops
from polysketch.attention.linearized import LinearizedAttention, widened
from polysketch.attention.masked import without_masked
from polysketch.attention.prefix_gain import mean_share
from polysketch.attention.redrawn import check_interval
from polysketch.attention.span_state import Following, SpanState, causal_linear_attention
from polysketch.feature_maps import PerformerFeatures
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.local_softmax import RemainingSums, local_softmax_attention


class PerformerAttention(LinearizedAttention):
    """o_i = sum_j w_ij v_j / sum_j w_ij, w_ij = phi(q_i) . phi(k_j) an estimate of exp(q_i . k_j / sqrt(head_dim)).

    Choromanski and others, "Rethinking Attention with Performers" (ICLR 2021), sections 2.2 to 2.4; phi, its constants
    and where they depart from published code: `PerformerFeatures`. One W a layer, for all heads.

    W is redrawn only where that is asked for: by `redraw_interval` in training, by `mechanism.feature_map.resample()`
    (the next draw of its seed), or by `.resample(generator)`. Draw number k depends on the seed and k alone. The seed
    of the next draw is saved with W, so that a resumed run draws as one left alone.

    With `local_chunk`, weights are exp(q_i . k_j / sqrt(head_dim)) exactly where i and j share an aligned chunk. They
    are estimated elsewhere. There is one numerator and one denominator. Both kinds of weights are on one scale: what a
    query's and the keys' constants took from the estimates is given back, as a logarithm, so that nothing overflows.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        num_features: m; the error of a weight falls as 1 / sqrt(m) and grows exponentially with |q'|^2 and |k'|^2.
        kind: "softmax", or "relu" for the features relu(W x') instead, which estimate another kernel.
        seed: of W; None takes one from PyTorch's default generator. Layers with the same seed have the same W.
        redraw_interval: training steps between draws of W; None keeps the first. What decodes from a state of before
            a draw would mix features: start a new state.
        local_chunk: tokens of a chunk with exact weights; None for estimates everywhere. For kind "softmax" alone: the
            relu kind's weights are the products of its features, in a chunk as anywhere, and estimate nothing that
            attention is known by.

    Raises:
        TypeError, ValueError: options of another type or out of range, or `local_chunk` with kind "relu".

    Cost: 2 head_dim m operations for each query and key and about 4 m (value_dim + 1) for the sums, a token and head;
    the state is m (value_dim + 1) numbers per key/value head. A local part adds local_chunk (head_dim + 2 value_dim)
    operations, and to the state the features, keys and values of one chunk. Features and values are float32 inside,
    whatever the inputs, for features span a range that float16 does not have.
    """

    feature_map: PerformerFeatures

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        num_features: int = 256,
        kind: Literal["softmax", "relu"] = "softmax",
        seed: int | None = None,
        redraw_interval: int | None = None,
        local_chunk: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_interval(redraw_interval)
        if local_chunk is not None:
            check_at_least_one(local_chunk=local_chunk)
            if kind != "softmax":
                raise ValueError(f"local_chunk needs kind='softmax', whose exact weights are known, got kind={kind!r}")
        self.redraw_interval, self.local_chunk = redraw_interval, local_chunk
        self.prefix_removed = False
        self.feature_map = PerformerFeatures(
            head_dim, num_features=num_features, kind=kind, seed=seed, num_kv_heads=self.num_kv_heads
        )

    @property
    def has_prefix(self) -> bool:
        """Whether there is a local part, so that the estimated rest is a prefix."""
        return self.local_chunk is not None

    @torch.no_grad()
    def prefix_share(
        self, query: Tensor, key: Tensor, *, key_mask: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        """The mean share of the attention mass that estimated weights hold, over tokens beyond the first chunk.

        Args:
            query, key, key_mask, hidden: as for `forward`.

        Returns:
            (num_heads,) in [0, 1]; 0 in a sequence of one chunk.

        Raises:
            ValueError: without a local part all weights are estimated.
        """
        self._expect_local("the share of the prefix")
        query, key, _, _ = self.real_inputs(query, key, key, key_mask)
        _, share = self._attend_locally(query, key, key[..., :0], causal=True, key_mask=key_mask)
        return mean_share(share, 1.0 - share)

    def remove_prefix(self) -> None:
        """Give estimated weights no mass from now on, so that only the local chunk is attended to: an ablation.

        Raises:
            ValueError: there is no local part, so nothing would be left.
        """
        self._expect_local("remove_prefix")
        self.prefix_removed = True

    def extra_repr(self) -> str:
        """Sizes and options; the map beside it names its own."""
        removed = ", prefix removed" if self.prefix_removed else ""
        options = f"redraw_interval={self.redraw_interval}, local_chunk={self.local_chunk}{removed}"
        return f"{super().extra_repr()}, {options}"

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
        """As `Mechanism.forward`; without `causal` a local chunk is exact on both sides of a token."""
        if self.local_chunk is None:
            options = {"causal": causal, "block_size": block_size, "key_mask": key_mask}
            return super().forward(query, key, widened(value), **options).to(value.dtype)  # type: ignore[arg-type]
        query, key, value, _ = self.real_inputs(query, key, value, key_mask)
        blocks = self.block_options(block_size)
        output, _ = self._attend_locally(query, key, value, causal=causal, key_mask=key_mask, **blocks)
        return output.to(value.dtype)

    def init_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> ops.LinearAttentionState:
        """As `LinearizedAttention.init_state`; with a local part values carry a column of ones."""
        value_dim = self.head_dim if value_dim is None else value_dim
        columns = value_dim + (self.local_chunk is not None)
        return super().init_state(batch_size, device, dtype, value_dim=columns)

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
        if self.local_chunk is None:
            output, state = super().extend(query, key, widened(value), state, block_size=block_size, key_mask=key_mask)
        else:
            query, key, value, _ = self.new_inputs(query, key, value, key_mask)
            blocks = self._blocks_after(state, block_size)
            output, _ = self._attend_locally(query, key, value, causal=True, key_mask=key_mask, state=state, **blocks)
        return output.to(value.dtype), state

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
        if self.local_chunk is None:
            output, after = super().forward_span(query, key, widened(value), state)
            return output.to(value.dtype), after
        self.check_inputs(query, key, value)
        sums = self.following(state)
        output, _ = self._attend_locally(query, key, value, causal=True, key_mask=None, state=sums)
        return output.to(value.dtype), SpanState(state.position + value.shape[2], sums.tensors())

    def _attend_locally(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None,
        state: ops.LinearAttentionState | ops.StateRows | Following | None = None,
        block_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output and the prefix's share of the mass of every token; a state moves on."""
        query, key, value = (widened(x) for x in (query, key, value))
        value = torch.cat([value, torch.ones_like(key[..., :1])], -1)
        value = without_masked(value, key_mask)  # its ones too
        opened = None
        if state is not None and not isinstance(state, Following):
            opened = ops.OpenChunk(*state.opened(), state.position.clone())  # before the state moves on
        sums = self._prefix_sums(query, key, value, causal, block_size, key_mask, state)
        sums = torch.zeros_like(sums) if self.prefix_removed else sums
        remaining, chunk = RemainingSums(sums, self.feature_map.log_scale(query)), self.local_chunk or 0
        query = query * self.head_dim**-0.5
        if isinstance(state, Following):
            return state.softmax_in_chunks(query, key, value, remaining, chunk=chunk)
        return local_softmax_attention(
            query,
            key,
            value,
            remaining,
            chunk=chunk,
            causal=causal,
            block_size=block_size,
            key_mask=key_mask,
            opened=opened,
        )

    def _prefix_sums(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        block_size: int | None,
        key_mask: Tensor | None,
        state: ops.LinearAttentionState | ops.StateRows | Following | None,
    ) -> Tensor:
        """Numerators over all chunks but a token's own: inside it, powers of queries of zeros stand for its weights."""
        features, chunk = self.feature_map.map_both(query, key), self.local_chunk or 0
        options: dict[str, Any] = {"normalize": False, "key_mask": key_mask, "block_size": block_size}
        if state is not None:
            local = ops.LocalPolynomial(torch.zeros_like(query), key, 2, chunk)
            return causal_linear_attention(*features, value, state, local=local, **options).output
        local = ops.LocalPolynomial(torch.zeros_like(query[..., :1]), key[..., :1], 2, chunk)
        return ops.linear_attention(*features, value, causal=causal, local=local, **options).output

    def _expect_local(self, what: str) -> None:
        if self.local_chunk is None:
            raise ValueError(f"{what} needs a local part: with local_chunk=None every weight is estimated")
