"""Polysketch attention around a window: softmax over the last tokens, and one key more for all before them."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch import ops
from polysketch.attention.base import Mechanism
from polysketch.attention.decay_gate import DecayGate
from polysketch.attention.far_logit import FarLogit
from polysketch.attention.linearized import in_range, widened
from polysketch.attention.recent_tokens import RecentTokens
from polysketch.attention.unit_scale import UnitScale, unit
from polysketch.feature_maps import FeatureMap, GaussianSketch, LearnedSketch, SoftCodes
from polysketch.ops.arguments import check_at_least_one

_TINY = 1e-30  # beside a mass of float32: what no token has
_SKETCHES = {"learned": LearnedSketch, "random": GaussianSketch}
FEATURES = ("codes", *_SKETCHES)


@dataclass
class WindowState:
    """The tokens of the window, and sums over all tokens before them.

    Attributes:
        recent: the last `window` tokens: keys as they are kept, their features behind them, and values.
        far: sums over the tokens that have left the window.
    """

    recent: RecentTokens
    far: ops.LinearAttentionState

    @property
    def position(self) -> Tensor:
        """(batch,) int64 in host memory, tokens seen since each row's first real one."""
        return self.recent.position

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: from the first tokens on the same at every position."""
        return self.recent.nbytes + self.far.nbytes

    def clone(self) -> "WindowState":
        """A copy to roll back to."""
        return WindowState(self.recent.clone(), self.far.clone())

    def reorder(self, indices: Tensor) -> "WindowState":
        """The rows `indices` (int64) of the batch, repeated or dropped as they are named: for beam search."""
        return WindowState(self.recent.reorder(indices), self.far.reorder(indices))


class PolysketchWindowAttention(Mechanism):
    """One softmax over the last `window` tokens, and over weights of features for all tokens before them.

        o_i = (sum_near e_ij v_j + exp(l_i) sum_far w_ij v_j) / (sum_near e_ij + exp(l_i) sum_far w_ij)
        e_ij = exp(c q^_i . k^_j / sqrt(head_dim)),  w_ij = (a(q_i) . a(k_j)) (b(q_i) . b(k_j)),  l_i = u . hidden_i + b

    With a sketch phi in place of the codes a and b, w_ij = (phi(q_i) . phi(k_j))^2.

    near are the last `window` tokens, the token itself included, and far all before them. q^ and k^ are queries and
    keys of root mean square one, and c is a learned scale. c, u and b are those of the key/value head. Features are
    taken of queries and keys before rotary positions, where the layer gives them: near tokens are told by their place,
    far ones by their content. A replaced layer of transformers does not give them.

    It is the form of PolySketchFormer (section 3.2) with three changes. Every query sees the same number of exact
    tokens, where aligned chunks show the first token of a chunk nothing but itself. Exact weights are those of softmax.
    And by `features` of "codes", one far key can weigh as much as hundreds of others (`SoftCodes`).

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        window: tokens with exact weights, the token itself included.
        features: "codes" (`SoftCodes`, of every key/value head its own), "learned" (Algorithm 2) or "random" (Algorithm
            1), the two sketches of PolySketchFormer, one for all heads.
        sketch_size: r: of each code, or the number of a sketch's features; time grows as r^2.
        degree: of the sketched polynomial, a power of two; codes have none.
        far_bias: the mean of the biases b, spread over the heads by 0.6 to either side. At -2 a far token weighs about
            a tenth of a near one to begin with, by codes or a learned sketch. A random sketch has weights near those of
            (q^ . k^)^degree, far larger: with heads of 64 and 32 features its share of the mass is that only near -14.
        decay_gate: decay far weights by a gate on the layer's input (`DecayGate`), from when a token leaves the window;
            causal only. Needs `hidden_size`.
        hidden_size: width of the layer's input, for b and the gate; None for a b that is constant.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range, or options that do not go together.

    Cost, a token and head, with F = r^2 products of codes or r (r + 1) / 2 of a sketch: 2 (head_dim + value_dim)
    (window + 31) operations in the window by the native program and more by others, 4 F (value_dim + 1) for the sums,
    and the features of a query and a key. Of the features nothing is written but 2 r or r numbers a token. The state is
    F (value_dim + 1) numbers a key/value head, and window (head_dim + value_dim + 2 r or r) of the window.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"window": 8, "sketch_size": 4, "far_bias": 0.0},
        {"window": 6, "sketch_size": 6, "features": "learned", "far_bias": 3.3},
        {"window": 8, "sketch_size": 8, "features": "random", "far_bias": -6.0, "decay_gate": True},
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        window: int = 256,
        features: Literal["codes", "learned", "random"] = "codes",
        sketch_size: int = 24,
        degree: int = 4,
        far_bias: float = -2.0,
        decay_gate: bool = False,
        hidden_size: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_at_least_one(window=window, sketch_size=sketch_size)
        if features not in FEATURES:
            raise ValueError(f"features must be one of {', '.join(map(repr, FEATURES))}, got {features!r}")
        if decay_gate and hidden_size is None:
            raise ValueError("decay_gate=True needs hidden_size, the width of the layer's input")
        self.window, self.far_bias, self.prefix_removed = window, far_bias, False
        self.features, self.is_bidirectional = features, not decay_gate
        self.feature_map = self._feature_map(sketch_size, degree)
        self.unit_scale = UnitScale(self.num_kv_heads)
        self.far_logit = FarLogit(hidden_size, self.num_kv_heads, far_bias)
        self.decay_gate = DecayGate(hidden_size, self.num_kv_heads) if decay_gate and hidden_size is not None else None

    @property
    def has_prefix(self) -> bool:
        """There always is a rest beyond the window."""
        return True

    @property
    def reads_hidden(self) -> bool:
        """Whether the weight of the far part, or its decay, depends on the layer's input."""
        return self.far_logit.reads_hidden or self.decay_gate is not None

    @property
    def reads_unrotated(self) -> bool:
        """Features are taken of what rotary positions have not turned."""
        return True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = True,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
        unrotated: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """As `Mechanism.forward`.

        Args:
            query, key, value, causal, key_mask, hidden: as there.
            unrotated: query and key before rotary positions, for features; those given when None.
        """
        self.check_inputs(query, key, value)
        value = _without_masked(value, key_mask)
        beside = self._far(unrotated or (query, key), value, causal, key_mask, hidden)
        return self._near(query, key, value, beside, causal, key_mask).to(value.dtype)

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
        logit, value = self._far(unrotated or (query, key), nothing, True, key_mask, hidden)
        share = self._near(query, key, nothing, ops.BesideKey(logit, value + 1.0), True, key_mask)[..., 0]
        beyond = logit > float("-inf")
        if key_mask is not None:
            beyond = beyond & key_mask[:, None]
        return (share * beyond).sum((0, 2)) / beyond.sum((0, 2)).clamp(min=1)

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
            self.head_dim if value_dim is None else value_dim,
            power=self.feature_map.power,
            factors=self.feature_map.factors,
            device=like.device if device is None else device,
            dtype=like.dtype if dtype is None else dtype,
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
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
        unrotated: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, WindowState]:
        """As `Mechanism.extend`: tokens that leave the window are added to the sums.

        Args:
            query, key, value, state, key_mask, hidden: as there.
            unrotated: as for `forward`.
        """
        self.check_inputs(query, key, value)
        far_logit, log_decay = self.far_logit(hidden), self._log_decay(hidden, key_mask)  # refused before all else
        query_features, key_features = self._features(unrotated or (query, key), value.dtype, key_mask)
        query, key = self.unit_scale(query, key, value.dtype)
        kept, value = torch.cat([key, key_features], -1), _without_masked(value, key_mask)
        self._check_state(query, value, state, hidden)
        (rows, values, mask), (left, leaving) = self._move(state.recent, kept, value, key_mask)
        keys, features = rows[..., : self.head_dim], left[..., self.head_dim :]
        leaving = in_range(leaving)
        far = ops.linear_attention_extend_(
            query_features.to(leaving.dtype),
            features.to(leaving.dtype),
            leaving,
            state.far,
            log_decay=log_decay,
            **self._options(),
        )
        beside = self._beside(far.output, far.denominator, far_logit)
        near = ops.sliding_window_attention_with_cache(
            query.to(keys.dtype), keys, values, window=self.window, key_mask=mask, beside=beside
        )
        return near.to(value.dtype), state

    def extra_repr(self) -> str:
        """Sizes and options."""
        removed = ", prefix removed" if self.prefix_removed else ""
        options = f"window={self.window}, features={self.features!r}, far_bias={self.far_bias!r}"
        return f"{super().extra_repr()}, {options}{removed}"

    # The window.

    def _near(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beside: ops.BesideKey,
        causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor:
        query, key = self.unit_scale(query, key, value.dtype)
        return ops.sliding_window_attention(
            query, key, value, window=self.window, causal=causal, key_mask=key_mask, beside=beside
        )

    def _check_state(self, query: Tensor, value: Tensor, state: WindowState, hidden: Tensor | None) -> None:
        """Refuse here what would be refused after the window has moved."""
        expected = (state.far.sums.shape[0], state.far.sums.shape[3], value.shape[2])
        found = (value.shape[0], value.shape[3], query.shape[2])
        if found != expected:
            raise ValueError(f"the state takes (rows, value width, queries as many as keys) {expected}, got {found}")
        if hidden is not None and hidden.shape[:2] != (value.shape[0], value.shape[2]):
            raise ValueError(
                f"hidden must be (batch, length, width) of the {value.shape[2]} new tokens of "
                f"{value.shape[0]} rows, got {tuple(hidden.shape)}"
            )

    def _move(
        self, recent: RecentTokens, kept: Tensor, value: Tensor, key_mask: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]:
        """The window moves over new tokens.

        Returns:
            What the new tokens see, keys, values and mask, and what leaves: as many tokens as are new, zeros while the
            window is not full. One token of every row sees the ring in any order: softmax does not ask for one.
        """
        if kept.shape[2] == 1:
            leaving = recent.oldest(kept, value)
            recent.append(kept, value, key_mask)
            return recent.slots(kept, value), leaving
        rows, values, mask = recent.followed_by(kept, value, key_mask)
        recent.append(kept, value, key_mask)
        missing, new = kept.shape[2] + self.window - rows.shape[2], kept.shape[2]
        left, leaving_values = (F.pad(x, (0, 0, missing, 0))[:, :, :new] for x in (rows, values))
        return (rows, values, mask), (left, leaving_values)

    # All tokens before it.

    def _feature_map(self, sketch_size: int, degree: int) -> FeatureMap:
        sizes: dict[str, Any] = {"head_dim": self.head_dim, "num_kv_heads": self.num_kv_heads}
        if self.features == "codes":
            return SoftCodes(**sizes, codewords=sketch_size)
        return _SKETCHES[self.features](**sizes, degree=degree, sketch_size=sketch_size)

    def _features(
        self, vectors: tuple[Tensor, Tensor], dtype: torch.dtype, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Features in `dtype`; those of a masked key are zeros, and give no weight."""
        query, key = vectors
        if self.features == "random":  # the others begin with a norm of their own
            query, key = unit(query).to(query.dtype), unit(key).to(key.dtype)
        query_features, key_features = self.feature_map.map_both(query, key)
        return query_features.to(dtype), _without_masked(key_features, key_mask).to(dtype)

    def _log_decay(self, hidden: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
        if self.decay_gate is None:
            return None
        log_decay = self.decay_gate(hidden)
        return log_decay if key_mask is None else log_decay.masked_fill(~key_mask[:, None], 0.0)

    def _far(
        self,
        vectors: tuple[Tensor, Tensor],
        value: Tensor,
        causal: bool,
        key_mask: Tensor | None,
        hidden: Tensor | None,
    ) -> ops.BesideKey:
        """All tokens beyond the window as one key."""
        if not causal and self.decay_gate is not None:
            raise ValueError("a decay over the tokens before has no other direction: decay_gate=True is causal only")
        wide = in_range(value)
        features = self._features(vectors, wide.dtype, key_mask)
        numerator, mass = self._before(*features, wide, self._log_decay(hidden, key_mask))
        if not causal:
            turned = [x.flip(2) for x in (*features, wide)]
            after = self._before(turned[0], turned[1], turned[2], None)
            numerator, mass = numerator + after[0].flip(2), mass + after[1].flip(2)
        return self._beside(numerator, mass, self.far_logit(hidden))

    def _before(
        self, query_features: Tensor, key_features: Tensor, value: Tensor, log_decay: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sums over all tokens before the window, of weights times values and of weights.

        It is causal attention to keys that come `window` tokens late.
        """
        late = (delayed(x, self.window) for x in (key_features, value))
        found = ops.linear_attention(query_features, *late, causal=True, log_decay=log_decay, **self._options())
        return found.output, found.denominator

    def _options(self) -> dict[str, Any]:
        """What the op is told of the features. It does not divide: masses may be too small for their reciprocal."""
        return {"power": self.feature_map.power, "factors": self.feature_map.factors, "normalize": False}

    def _beside(self, numerator: Tensor, mass: Tensor, far_logit: Tensor) -> ops.BesideKey:
        """The key whose weight is the far mass times exp(l), and whose value is the far mean; none without a mass."""
        none = mass <= _TINY if not self.prefix_removed else torch.ones_like(mass, dtype=torch.bool)
        mass = mass.masked_fill(none, 1.0)
        far_logit = far_logit.repeat_interleave(self.num_heads // self.num_kv_heads, 1)
        logit = (mass.log() + far_logit).masked_fill(none, float("-inf"))
        return ops.BesideKey(logit, (numerator / mass[..., None]).masked_fill(none[..., None], 0.0))


def _without_masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x (batch, heads, length, width) with zeros at masked tokens, whatever stands there."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0.0)


def delayed(x: Tensor, by: int) -> Tensor:
    """x (batch, heads, length, width) with every token `by` places later, zeros before."""
    length = x.shape[2]
    return F.pad(x[:, :, : max(0, length - by)], (0, 0, min(by, length), 0))
