"""Polysketch attention around a window: softmax to the last tokens, sketched weights for all before, and a gate."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polysketch import ops
from polysketch.attention.base import Mechanism
from polysketch.attention.decay_gate import DecayGate
from polysketch.attention.far_gate import FarGate
from polysketch.attention.linearized import in_range, widened
from polysketch.attention.recent_tokens import RecentTokens
from polysketch.attention.unit_scale import UnitScale, unit
from polysketch.feature_maps import GaussianSketch, LearnedSketch
from polysketch.ops.arguments import check_at_least_one


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
    """o_i = a_i + g_i s_i (f_i - a_i): the window's answer a_i, moved towards that of all tokens before it.

        a_i = sum_j softmax_j(c q^_i . k^_j / sqrt(head_dim)) v_j       over the last `window` tokens, itself included
        f_i = sum_j w_ij v_j / sum_j w_ij,  w_ij = (phi(q_i) . phi(k_j))^2          over all tokens before these
        s_i = sum_j w_ij / (0.01 + sum_j w_ij),  g_i = sigmoid(w . hidden_i + b)

    q^ and k^ are queries and keys of root mean square one, and c is a learned scale. c, w and b are those of the
    key/value head. phi is the sketch of `PolysketchAttention`.

    It is the form of PolySketchFormer (section 3.2) with three changes. Every query sees the same number of exact
    tokens, where aligned chunks show the first token of a chunk nothing but itself. Exact weights are those of softmax.
    Each part has a denominator of its own, for sketched weights have no bound and would take all of the mass of one.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        window: tokens with exact weights, the token itself included.
        degree: of the sketched polynomial, a power of two.
        sketch_size: r, the number of features; time grows as r^2.
        learned: the learned sketch (Algorithm 2), else the random one (Algorithm 1).
        share: "layer", one sketch for all heads, or "head", one for each key/value head.
        far_bias: the mean of the biases b. They are spread over the heads by 0.6 to either side: -2 opens heads by 7
            to 20 % to begin with.
        decay_gate: decay sketched weights by a gate on the layer's input (`DecayGate`), from when a token leaves the
            window; causal only. Needs `hidden_size`.
        hidden_size: width of the layer's input, for the gates; None for gates that are constants.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range, or options that do not go together.

    Cost, a token and head, r = sketch_size: 2 (head_dim + value_dim) (window + 255) operations in the window,
    2 r (r + 1) (value_dim + 2) for the sums, and the sketch of a query and a key. The state is about r^2 / 2
    (value_dim + 2) numbers a key/value head, and window (head_dim + r + value_dim) of the window.
    """

    offset = 0.01  # the start of a sequence has no far tokens: small beside the weights of few
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"window": 8, "sketch_size": 6, "far_bias": 0.0},
        {"window": 5, "sketch_size": 8, "far_bias": 0.0, "learned": False, "share": "head", "decay_gate": True},
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        window: int = 256,
        degree: int = 4,
        sketch_size: int = 32,
        learned: bool = True,
        share: Literal["layer", "head"] = "layer",
        far_bias: float = -2.0,
        decay_gate: bool = False,
        hidden_size: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_at_least_one(window=window)
        if decay_gate and hidden_size is None:
            raise ValueError("decay_gate=True needs hidden_size, the width of the layer's input")
        sketch = LearnedSketch if learned else GaussianSketch
        self.window, self.far_bias, self.prefix_removed = window, far_bias, False
        self.is_bidirectional, self.learned = not decay_gate, learned
        self.feature_map = sketch(
            head_dim, degree=degree, sketch_size=sketch_size, num_kv_heads=self.num_kv_heads, share=share
        )
        self.unit_scale = UnitScale(self.num_kv_heads)
        self.far_gate = FarGate(hidden_size, self.num_kv_heads, far_bias)
        self.decay_gate = DecayGate(hidden_size, self.num_kv_heads) if decay_gate and hidden_size is not None else None

    @property
    def has_prefix(self) -> bool:
        """There always is a sketched rest."""
        return True

    @property
    def reads_hidden(self) -> bool:
        """Whether the gates read the layer's input."""
        return self.far_gate.reads_hidden or self.decay_gate is not None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = True,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """As `Mechanism.forward`."""
        self.check_inputs(query, key, value)
        near = self._near(query, key, value, causal, key_mask)
        numerator, mass = self._far(query, key, value, causal, key_mask, hidden)
        return self._joined(near, numerator, mass, hidden).to(value.dtype)

    @torch.no_grad()
    def prefix_share(
        self, query: Tensor, key: Tensor, *, key_mask: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        """The mean of g_i s_i, over tokens beyond the window: how far the output moves towards the sketched part.

        Args:
            query, key, key_mask, hidden: as for `forward`.

        Returns:
            (num_heads,) in [0, 1]; 0 in a sequence that fits into the window.
        """
        _, mass = self._far(query, key, widened(key[..., :1]), True, key_mask, hidden)
        share = self._gate(hidden) * (mass / (self.offset + mass))[..., 0]
        beyond = mass[..., 0] > 0
        return (share * beyond).sum((0, 2)) / beyond.sum((0, 2)).clamp(min=1)

    def remove_prefix(self) -> None:
        """Close the gates for good, so that only the window is attended to: an ablation."""
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
            (self.head_dim if value_dim is None else value_dim) + 1,
            power=self.feature_map.power,
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
    ) -> tuple[Tensor, WindowState]:
        """As `Mechanism.extend`: tokens that leave the window are added to the sums."""
        self.check_inputs(query, key, value)
        query_features, key_features = self._features(query, key, value.dtype, key_mask)
        query, key = self.unit_scale(query, key, value.dtype)
        kept = torch.cat([key, key_features], -1)
        near, leaving = self._slide(query, kept, value, state.recent, key_mask)
        features, values = leaving
        options: dict[str, Any] = {
            "power": self.feature_map.power,
            "normalize": False,
            "log_decay": self._log_decay(hidden, key_mask),
        }
        wide = with_one(in_range(values))
        sums = ops.linear_attention_extend_(
            query_features.to(wide.dtype), features.to(wide.dtype), wide, state.far, **options
        )
        return self._joined(near, sums[..., :-1], sums[..., -1:], hidden).to(value.dtype), state

    def extra_repr(self) -> str:
        """Sizes and options."""
        removed = ", prefix removed" if self.prefix_removed else ""
        return f"{super().extra_repr()}, window={self.window}, far_bias={self.far_bias!r}{removed}"

    # The window.

    def _near(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, key_mask: Tensor | None) -> Tensor:
        query, key = self.unit_scale(query, key, value.dtype)
        return ops.sliding_window_attention(query, key, value, window=self.window, causal=causal, key_mask=key_mask)

    def _slide(
        self, query: Tensor, kept: Tensor, value: Tensor, recent: RecentTokens, key_mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The window's answers to new tokens, and the features and values of as many that leave it; both move on."""
        rows, values, mask = recent.followed_by(kept, value, key_mask)
        keys, features = rows.split((self.head_dim, self.feature_map.feature_dim), -1)
        near = ops.sliding_window_attention_with_cache(
            query.to(keys.dtype), keys, values, window=self.window, key_mask=mask
        )
        recent.append(kept, value, key_mask)
        new, missing = query.shape[2], query.shape[2] + self.window - keys.shape[2]
        features, values = (F.pad(x, (0, 0, missing, 0))[:, :, :new] for x in (features, values))
        return near, (features, values)

    # All tokens before it.

    def _features(
        self, query: Tensor, key: Tensor, dtype: torch.dtype, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Features in `dtype`; those of a masked key are zeros, and give no weight."""
        if not self.learned:  # the learned sketch begins with a norm of its own
            query, key = unit(query).to(query.dtype), unit(key).to(key.dtype)
        query_features, key_features = self.feature_map.map_both(query, key)
        if key_mask is not None:
            key_features = key_features.masked_fill(~key_mask[:, None, :, None], 0.0)
        return query_features.to(dtype), key_features.to(dtype)

    def _log_decay(self, hidden: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
        if self.decay_gate is None:
            return None
        log_decay = self.decay_gate(hidden)
        return log_decay if key_mask is None else log_decay.masked_fill(~key_mask[:, None], 0.0)

    def _far(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        key_mask: Tensor | None,
        hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Sums of weighted values (..., value_dim) and of weights (..., 1) over all tokens beyond the window."""
        wide = with_one(in_range(value))
        features = self._features(query, key, wide.dtype, key_mask)
        sums = self._before(*features, wide, self._log_decay(hidden, key_mask))
        if not causal and self.decay_gate is not None:
            raise ValueError("a decay over the tokens before has no other direction: decay_gate=True is causal only")
        if not causal:
            turned = [x.flip(2) for x in (*features, wide)]
            sums = sums + self._before(turned[0], turned[1], turned[2], None).flip(2)
        return sums[..., :-1], sums[..., -1:]

    def _before(self, query_features: Tensor, key_features: Tensor, value: Tensor, log_decay: Tensor | None) -> Tensor:
        """The sums over all tokens before the window: causal attention to keys that come `window` tokens late."""
        late = (delayed(x, self.window) for x in (key_features, value))
        options: dict[str, Any] = {
            "power": self.feature_map.power,
            "causal": True,
            "normalize": False,
            "log_decay": log_decay,
        }
        return ops.linear_attention(query_features, *late, **options).output

    def _joined(self, near: Tensor, numerator: Tensor, mass: Tensor, hidden: Tensor | None) -> Tensor:
        """a + g s (f - a), with f = numerator / mass and s = mass / (offset + mass): no division by zero."""
        return near + self._gate(hidden)[..., None] * (numerator - mass * near) / (self.offset + mass)

    def _gate(self, hidden: Tensor | None) -> Tensor:
        """(batch or 1, num_heads, length or 1)."""
        gate = self.far_gate(hidden).repeat_interleave(self.num_heads // self.num_kv_heads, 1)
        return torch.zeros_like(gate) if self.prefix_removed else gate


def with_one(value: Tensor) -> Tensor:
    """value with a last column of ones: its weighted sum is the sum of weights."""
    return F.pad(value, (0, 1), value=1.0)


def delayed(x: Tensor, by: int) -> Tensor:
    """x (batch, heads, length, width) with every token `by` places later, zeros before."""
    length = x.shape[2]
    return F.pad(x[:, :, : max(0, length - by)], (0, 0, min(by, length), 0))
