"""Softmax over a sliding window, and one key beside it that stands for all tokens before the window."""

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch import ops
from polysketch.attention.abilities import mechanisms_that
from polysketch.attention.head_logit import HeadLogit
from polysketch.attention.heads import require_as_many
from polysketch.attention.linearized import in_range, sums_of_single_tokens, widened
from polysketch.attention.masked import finite_at_masked, without_masked
from polysketch.attention.recent_tokens import RecentTokens
from polysketch.attention.redrawn import RedrawnFeatures
from polysketch.attention.span_state import Following, SpanState, sum_tensors
from polysketch.attention.unit_scale import UnitScale
from polysketch.attention.window_state import WindowState
from polysketch.feature_maps import FeatureMap
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.linear.packing import expanded_size

SKETCHED = {"unrotated": 1, "rotated": 1, "both": 2}
"""Of which vectors features are taken: queries and keys before rotary positions, after them, or one behind the other;
and how many heads wide they are."""


def sketched_width(head_dim: int, sketched: str) -> int:
    """How wide the vectors are that features are taken of.

    Raises:
        ValueError: not a key of `SKETCHED`.
    """
    if sketched not in SKETCHED:
        raise ValueError(f"sketched must be one of {', '.join(map(repr, SKETCHED))}, got {sketched!r}")
    return head_dim * SKETCHED[sketched]


class BesideWindow(RedrawnFeatures):
    """One softmax over the last `window` tokens and one key beside them, whose value is recalled from sums.

        o_i = (sum_near e_ij v_j + exp(l_i) r_i) / (sum_near e_ij + exp(l_i))
        e_ij = exp(c q^_i . k^_j / sqrt(head_dim))

    near are the last `window` tokens, the token itself included. q^ and k^ are queries and keys of root mean square
    one (or as they are), and c is a learned scale of the key/value head. Every token that leaves the window goes into
    sums of constant size. A subclass says what is kept of it (`_features`), and which value r_i and logit l_i are
    recalled (`_recall`).

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        window: tokens with exact weights, the token itself included.
        feature_map: of vectors of `sketched_width`, made before.
        far_bias: the mean over the heads of what is added to every l_i to begin with.
        hidden_size: width of the layer's input, on which l_i then depends; None where it does not.
        normed: whether q^ and k^ have a norm.
        sketched: a key of `SKETCHED`.

    Raises:
        ValueError: an option out of range.
    """

    is_blockwise = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None,
        *,
        window: int,
        feature_map: FeatureMap,
        far_bias: float,
        hidden_size: int | None,
        normed: bool = True,
        sketched: str = "unrotated",
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_at_least_one(window=window)
        self.window, self.far_bias, self.prefix_removed, self.sketched = window, far_bias, False, sketched
        self.feature_map = feature_map
        self.unit_scale = UnitScale(self.num_kv_heads, normed=normed)
        self.far_logit = HeadLogit(hidden_size, self.num_kv_heads, far_bias, "far_bias")

    def _features(
        self,
        vectors: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        key_mask: Tensor | None,
        hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Of queries (batch, num_heads, length, r), and what is kept of keys (batch, num_kv_heads, length, any width).

        A token of which zeros are kept, as of masked ones, changes nothing.

        Args:
            vectors: query and key, before rotary positions where the layer gives them.
            dtype: that both are to have.
            key_mask, hidden: as for `forward`.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps nothing of its tokens")

    def _recall(
        self,
        query_features: Tensor,
        left: Tensor,
        value: Tensor,
        log_decay: Tensor | None,
        state: ops.LinearAttentionState | ops.StateRows | Following | None,
    ) -> tuple[Tensor, Tensor]:
        """What every query finds beyond its window: values, and logits without the layer's own; -inf for nothing.

        Args:
            query_features: of as many queries as tokens leave the window.
            left: what was kept of the tokens that leave, each when its query comes; zeros where none does.
            value: of those tokens.
            log_decay: as `_log_decay` gives it.
            state: sums over the tokens that left before, which move on: in place where they are those of decoding.
                None for a whole sequence, and then, as of a `Following`, everything is differentiable.
        """
        raise NotImplementedError(f"{type(self).__name__} recalls nothing")

    def _log_decay(self, hidden: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
        """(batch, num_kv_heads, length), by how much the sums decay at every token; None for not at all."""
        return None

    def why_not_blocks(self, block_size: int) -> str | None:
        """As `Mechanism.why_not_blocks`: a block lies within the window of each of its tokens.

        So what is beyond the window is before the block, and is recalled in the order of tokens.
        """
        if block_size <= self.window:
            return super().why_not_blocks(block_size)
        return f"block_size must be at most the window of {self.window} tokens, got {block_size}"

    @property
    def sums_width(self) -> int:
        """By how much values in the sums are wider than values."""
        return 0

    @property
    def kept_width(self) -> int:
        """The width of what is kept of a key for the sums."""
        return self.feature_map.feature_dim

    @property
    def has_prefix(self) -> bool:
        """There always is a rest beyond the window."""
        return True

    @property
    def reads_hidden(self) -> bool:
        """Whether the logit of the key beside depends on the layer's input."""
        return self.far_logit.reads_hidden

    @property
    def is_cross(self) -> bool:
        """A window has the key's tokens around the query's."""
        return False

    @property
    def reads_unrotated(self) -> bool:
        """Whether features are taken of what rotary positions have not turned."""
        return self.sketched != "rotated"

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
        unrotated: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """As `Mechanism.forward`.

        Args:
            query, key, value, causal, block_size, key_mask, hidden: as there.
            unrotated: query and key before rotary positions, for features; those given when None.
        """
        query, key, value, hidden = self.real_inputs(query, key, value, key_mask, hidden)
        require_as_many(query, key)
        blocks = self.block_options(block_size)
        vectors = self._sketched(query, key, unrotated, key_mask)
        beside = self._far(vectors, value, causal, key_mask, hidden)
        return self._near(query, key, value, beside, causal, key_mask, **blocks).to(value.dtype)

    @torch.no_grad()
    def prefix_share(
        self,
        query: Tensor,
        key: Tensor,
        *,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
        unrotated: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The mean share of the mass that lies beyond the window, over tokens that have anything there.

        Args:
            query, key, key_mask, hidden, unrotated: as for `forward`.

        Returns:
            (num_heads,) in [0, 1]; 0 in a sequence that fits into the window.
        """
        nothing = torch.zeros_like(widened(key[..., :1]))
        query, key, nothing, hidden = self.real_inputs(query, key, nothing, key_mask, hidden)
        vectors = self._sketched(query, key, unrotated, key_mask)
        logit, value = self._far(vectors, nothing, True, key_mask, hidden)
        share = self._near(query, key, nothing, ops.BesideKey(logit, value + 1.0), True, key_mask)[..., 0]
        beyond = logit > float("-inf")
        if key_mask is not None:
            beyond = beyond & key_mask[:, None]
        return (share * beyond).sum((0, 2)) / beyond.sum((0, 2)).clamp(min=1)

    def why_not_sums_in(self, dtype: torch.dtype) -> str | None:
        """As `Mechanism.why_not_sums_in`."""
        return sums_of_single_tokens(self)

    def remove_prefix(self) -> None:
        """Take all weight from what lies beyond the window, for good: an ablation."""
        self.prefix_removed = True

    def init_state(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> WindowState:
        """An empty window and sums of zero; their size does not depend on the context."""
        like = self.unit_scale.log_scale
        far = ops.LinearAttentionState.init(
            batch_size,
            self.num_kv_heads,
            self.feature_map.feature_dim,
            (self.head_dim if value_dim is None else value_dim) + self.sums_width,
            power=self.feature_map.power,
            factors=self.feature_map.factors,
            device=like.device if device is None else device,
            dtype=like.dtype if dtype is None else dtype,
            sums_dtype=self.sums_dtype,
        )
        return WindowState(RecentTokens(batch_size, self.window, device, dtype), far)

    @torch.no_grad()
    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: WindowState,
        *,
        block_size: int | None = None,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
        unrotated: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, WindowState]:
        """As `Mechanism.extend`: tokens that leave the window are added to the sums.

        Args:
            query, key, value, state, block_size, key_mask, hidden: as there.
            unrotated: as for `forward`.
        """
        query, key, value, hidden = self.new_inputs(query, key, value, key_mask, hidden)
        if value.shape[2] == 1 and block_size is None and key_mask is None:
            output = self._extend_by_program(query, key, value, state, hidden, unrotated)
            if output is not None:
                return output, state
        far_logit, log_decay = self.far_logit(hidden), self._log_decay(hidden, key_mask)  # refused before all else
        blocks = self._blocks_after(state, block_size)
        self._check_state(query, value, state)
        vectors = self._sketched(query, key, unrotated, key_mask)
        query_features, kept = self._features(vectors, value.dtype, key_mask, hidden)
        query, key = self.unit_scale(query, key, value.dtype)
        kept = torch.cat([key, kept], -1)
        (rows, values, mask), (left, leaving) = self._move(state.recent, kept, value, key_mask)
        keys, leaving = rows[..., : self.head_dim], in_range(leaving)
        of_query, of_key = query_features.to(leaving.dtype), left[..., self.head_dim :].to(leaving.dtype)
        found = self._recall(of_query, of_key, leaving, log_decay, state.far)
        beside = self._beside(*found, far_logit)
        near = ops.sliding_window_attention_with_cache(
            query.to(keys.dtype),
            keys,
            values,
            window=self.window,
            key_mask=mask,
            key_rows=state.recent.rows if value.shape[2] == 1 else None,
            beside=beside,
            **blocks,
        )
        return near.to(value.dtype), state

    def _extend_by_program(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: WindowState,
        hidden: Tensor | None,
        unrotated: tuple[Tensor, Tensor] | None,
    ) -> Tensor | None:
        """The output of one real token of every row, and `state` moved on; None where there is no program for it all.

        Args:
            query, key, value, state, hidden, unrotated: as for `extend`.
        """
        return None

    def init_span(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        value_dim: int | None = None,
    ) -> SpanState:
        """As `Mechanism.init_span`: the tokens of the window, zeros where there are none yet, and sums."""
        state = self.init_state(batch_size, device, dtype, value_dim=value_dim)
        like, width = self.unit_scale.log_scale, self.head_dim if value_dim is None else value_dim
        nothing = like.new_zeros(batch_size, self.num_kv_heads, self.window, 0, device=device, dtype=dtype)
        widths = {"key": self.head_dim, "kept": self.kept_width, "value": width}
        recent = {name: F.pad(nothing, (0, width)) for name, width in widths.items()}
        return SpanState(0, {**recent, **sum_tensors(state.far.pool)})

    def forward_span(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: SpanState,
        *,
        hidden: Tensor | None = None,
        unrotated: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, SpanState]:
        """As `Mechanism.forward_span`: tokens that leave the window are added to the sums.

        Args:
            query, key, value, state, hidden: as there.
            unrotated: as for `forward`.
        """
        self.check_inputs(query, key, value, hidden)
        far_logit, log_decay = self.far_logit(hidden), self._log_decay(hidden, None)
        vectors = self._sketched(query, key, unrotated, None)
        query_features, kept = self._features(vectors, in_range(value).dtype, None, hidden)
        query, key = self.unit_scale(query, key, value.dtype)
        new = {"key": key, "kept": kept, "value": value}
        seen = {name: state.followed_by(name, x) for name, x in new.items()}
        left, leaving = (self._leaving(seen[name], value.shape[2]) for name in ("kept", "value"))
        far = state.sums(power=self.feature_map.power, factors=self.feature_map.factors)
        beside = self._beside(*self._recall(query_features, left, in_range(leaving), log_decay, far), far_logit)
        near = state.window_attention(query, seen["key"], seen["value"], window=self.window, beside=beside)
        recent = {name: state.kept_after(name, x) for name, x in new.items()}
        after = SpanState(state.position + value.shape[2], {**recent, **far.tensors()})
        return near.to(value.dtype), after

    def alike_position(self, position: int) -> int:
        """As `Mechanism.alike_position`: once the window is full, all are alike."""
        return min(position, self.window)

    def _leaving(self, seen: Tensor, new: int) -> Tensor:
        """The tokens that leave the window, one for each new one, zeros while it is not full."""
        return F.pad(seen, (0, 0, max(0, new + self.window - seen.shape[2]), 0))[:, :, :new]

    def extra_repr(self) -> str:
        """Sizes and options."""
        removed = ", prefix removed" if self.prefix_removed else ""
        given = f"normed={self.unit_scale.normed}, sketched={self.sketched!r}"
        return f"{super().extra_repr()}, window={self.window}, far_bias={self.far_bias!r}, {given}{removed}"

    def _sketched(
        self, query: Tensor, key: Tensor, unrotated: tuple[Tensor, Tensor] | None, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What features are taken of: query and key as `Mechanism.real_inputs` gives them, or before rotary positions,
        or both side by side."""
        if unrotated is None or self.sketched == "rotated":
            before = (query, key)
        else:
            _check_unrotated(unrotated, query, key)
            before = finite_at_masked(unrotated[0], key_mask), without_masked(unrotated[1], key_mask)
        if self.sketched != "both":
            return before
        return torch.cat([query, before[0]], -1), torch.cat([key, before[1]], -1)

    def _near(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beside: ops.BesideKey,
        causal: bool,
        key_mask: Tensor | None,
        block_size: int | None = None,
    ) -> Tensor:
        query, key = self.unit_scale(query, key, value.dtype)
        return ops.sliding_window_attention(
            query,
            key,
            value,
            window=self.window,
            causal=causal,
            block_size=block_size,
            key_mask=key_mask,
            beside=beside,
        )

    def _check_state(self, query: Tensor, value: Tensor, state: WindowState) -> None:
        """Refuse here what would be refused after the window has moved."""
        expected = (state.far.batch_size, state.far.value_dim - self.sums_width, value.shape[2])
        found = (value.shape[0], value.shape[3], query.shape[2])
        if found != expected:
            raise ValueError(f"the state takes (batch size, value width, as many queries) {expected}, got {found}")
        wide = state.far.pool.normalizer.dtype
        if torch.promote_types(value.dtype, wide) != wide:
            raise TypeError(f"the state's sums are {wide}, the tokens {value.dtype}: cast the tokens")
        of_map = self.feature_map
        sums = of_map.power, of_map.factors, expanded_size(of_map.feature_dim, of_map.power, of_map.factors)
        state.require_sizes(self.num_kv_heads, self.window, self.head_dim + self.kept_width, value.shape[3], sums)

    def _move(
        self, recent: RecentTokens, kept: Tensor, value: Tensor, key_mask: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]:
        """The window moves over new tokens.

        Returns:
            What the new tokens see, keys, values and mask, and what leaves: as many tokens as are new, zeros while the
            window is not full. One token of every row sees the ring in any order, for softmax does not ask for one, and
            all rows of the buffers, of which `recent.rows` are meant.
        """
        if kept.shape[2] == 1:
            leaving = recent.oldest(kept, value)
            recent.append(kept, value, key_mask)
            return recent.buffers(kept, value), leaving
        rows, values, mask = recent.followed_by(kept, value, key_mask)
        recent.append(kept, value, key_mask)
        return (rows, values, mask), (self._leaving(rows, kept.shape[2]), self._leaving(values, kept.shape[2]))

    def _far(
        self,
        vectors: tuple[Tensor, Tensor],
        value: Tensor,
        causal: bool,
        key_mask: Tensor | None,
        hidden: Tensor | None,
    ) -> ops.BesideKey:
        """All tokens beyond the window as one key."""
        if not causal:
            raise ValueError(
                f"{type(self).__name__} is causal only: what is recalled depends on the order of tokens; mechanisms "
                f"that see both sides: {', '.join(mechanisms_that('is_bidirectional'))}"
            )
        far_logit, log_decay, wide = self.far_logit(hidden), self._log_decay(hidden, key_mask), in_range(value)
        query_features, kept = self._features(vectors, wide.dtype, key_mask, hidden)
        left, leaving = delayed(kept, self.window), delayed(wide, self.window)
        return self._beside(*self._recall(query_features, left, leaving, log_decay, None), far_logit)

    def _beside(self, value: Tensor, logit: Tensor, far_logit: Tensor) -> ops.BesideKey:
        """The key beside; its logit -inf where there is nothing beyond the window."""
        logit = logit + far_logit.repeat_interleave(self.num_heads // self.num_kv_heads, 1)
        if self.prefix_removed:
            logit = torch.full_like(logit, float("-inf"))
        return ops.BesideKey(logit, value)


def delayed(x: Tensor, by: int) -> Tensor:
    """x (batch, heads, length, width) with every token `by` places later, zeros before."""
    length = x.shape[2]
    return F.pad(x[:, :, : max(0, length - by)], (0, 0, min(by, length), 0))


def _check_unrotated(unrotated: tuple[Tensor, Tensor], query: Tensor, key: Tensor) -> None:
    expected, found = ([tuple(x.shape) for x in pair] for pair in ((query, key), unrotated))
    if found != expected:
        raise ValueError(f"unrotated must be a query and a key of the shapes {expected}, got {found}")
