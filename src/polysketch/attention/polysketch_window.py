"""Polysketch attention around a window: softmax over the last tokens, and one key more for all before them."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from polysketch import ops
from polysketch.attention.beside_window import BesideWindow, delayed
from polysketch.attention.decay_gate import DecayGate
from polysketch.attention.linearized import in_range
from polysketch.attention.masked import without_masked
from polysketch.attention.redrawn import check_interval, first_seed
from polysketch.attention.span_state import Following, causal_linear_attention
from polysketch.attention.unit_scale import unit
from polysketch.feature_maps import FeatureMap, GaussianSketch, LearnedSketch, SoftCodes
from polysketch.ops.arguments import check_at_least_one

_TINY = 1e-30  # beside a mass of float32: what no token has
FEATURES = ("codes", "learned", "random")


class PolysketchWindowAttention(BesideWindow):
    """One softmax over the last `window` tokens, and over weights of features for all tokens before them.

        o_i = (sum_near e_ij v_j + exp(l_i) sum_far w_ij v_j) / (sum_near e_ij + exp(l_i) sum_far w_ij)
        e_ij = exp(c q^_i . k^_j / sqrt(head_dim)),  w_ij = (a(q_i) . a(k_j)) (b(q_i) . b(k_j)),  l_i = u . hidden_i + b

    With a sketch phi in place of the codes a and b, w_ij = (phi(q_i) . phi(k_j))^2.

    near are the last `window` tokens, the token itself included, and far all before them. q^ and k^ are queries and
    keys of root mean square one, and c is a learned scale. c, u and b are those of the key/value head. Features are
    taken of queries and keys before rotary positions, where the layer gives them: near tokens are told by their place,
    far ones by their content. A replaced layer of transformers gives them within rounding: it turns rotated ones back.

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
        redraw_interval: training steps between draws of the random sketch; None keeps the first. Needs
            features="random". What decodes from a state of before a draw would mix features: start a new state.

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
        {
            "window": 8,
            "sketch_size": 8,
            "features": "random",
            "far_bias": -5.4,
            "decay_gate": True,
            "redraw_interval": 3,
        },
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
        redraw_interval: int | None = None,
    ) -> None:
        check_at_least_one(sketch_size=sketch_size)
        if features not in FEATURES:
            raise ValueError(f"features must be one of {', '.join(map(repr, FEATURES))}, got {features!r}")
        if decay_gate and hidden_size is None:
            raise ValueError("decay_gate=True needs hidden_size, the width of the layer's input")
        check_interval(redraw_interval, is_random=features == "random", needs="features='random'")
        super().__init__(
            num_heads,
            head_dim,
            num_kv_heads,
            window=window,
            feature_map=_feature_map(
                features, head_dim, num_kv_heads or num_heads, sketch_size, degree, first_seed(redraw_interval)
            ),
            far_bias=far_bias,
            hidden_size=hidden_size,
        )
        self.features, self.is_bidirectional = features, not decay_gate
        self.redraw_interval = redraw_interval
        self.decay_gate = DecayGate(hidden_size, self.num_kv_heads) if decay_gate and hidden_size is not None else None

    @property
    def reads_hidden(self) -> bool:
        """Whether the weight of the far part, or its decay, depends on the layer's input."""
        return super().reads_hidden or self.decay_gate is not None

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, features={self.features!r}, redraw_interval={self.redraw_interval}"

    def _features(
        self,
        vectors: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        key_mask: Tensor | None,
        hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Features in `dtype`; those of a masked key are zeros, and give no weight."""
        query, key = vectors
        if self.features == "random":  # the others begin with a norm of their own
            query, key = unit(query).to(query.dtype), unit(key).to(key.dtype)
        query_features, key_features = self.feature_map.map_both(query, key)
        return query_features.to(dtype), without_masked(key_features, key_mask).to(dtype)

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
        """All tokens beyond the window as one key; without `causal` those on both sides of it."""
        if causal:
            return super()._far(vectors, value, causal, key_mask, hidden)
        if self.decay_gate is not None:
            raise ValueError("a decay over the tokens before has no other direction: decay_gate=True is causal only")
        wide = in_range(value)
        tokens = (*self._features(vectors, wide.dtype, key_mask, hidden), wide)
        before, after = (self._sums_of_whole(*each) for each in (tokens, tuple(x.flip(2) for x in tokens)))
        sums = (one + other.flip(2) for one, other in zip(before, after, strict=True))
        return self._beside(*_mean(*sums), self.far_logit(hidden))

    def _sums_of_whole(self, query_features: Tensor, key_features: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        left, leaving = delayed(key_features, self.window), delayed(value, self.window)
        return self._sums(query_features, left, leaving, None, None)

    def _recall(
        self,
        query_features: Tensor,
        left: Tensor,
        value: Tensor,
        log_decay: Tensor | None,
        state: ops.LinearAttentionState | ops.StateRows | Following | None,
    ) -> tuple[Tensor, Tensor]:
        """The mean of far values by their weights, and the logarithm of the weights' sum."""
        return _mean(*self._sums(query_features, left, value, log_decay, state))

    def _sums(
        self,
        query_features: Tensor,
        left: Tensor,
        value: Tensor,
        log_decay: Tensor | None,
        state: ops.LinearAttentionState | ops.StateRows | Following | None,
    ) -> tuple[Tensor, Tensor]:
        """Sums over all tokens before the window, of weights times values and of weights.

        The op does not divide: masses may be too small for their reciprocal.
        """
        options: dict[str, Any] = {"power": self.feature_map.power, "factors": self.feature_map.factors}
        options.update(normalize=False, log_decay=log_decay)
        found = causal_linear_attention(query_features, left, value, state, **options)
        return found.output, found.denominator


def _feature_map(
    features: str, head_dim: int, num_kv_heads: int, sketch_size: int, degree: int, seed: int | None
) -> FeatureMap:
    """The map of that name; `seed` is of the random sketch's draws."""
    if features == "codes":
        return SoftCodes(head_dim, num_kv_heads=num_kv_heads, codewords=sketch_size)
    sizes: dict[str, Any] = {"num_kv_heads": num_kv_heads, "degree": degree, "sketch_size": sketch_size}
    if features == "learned":
        return LearnedSketch(head_dim, **sizes)
    return GaussianSketch(head_dim, **sizes, seed=seed)


def _mean(numerator: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The mean value and the logarithm of the mass; zeros and -inf without a mass."""
    none = mass <= _TINY
    mass = mass.masked_fill(none, 1.0)
    value = (numerator / mass[..., None]).masked_fill(none[..., None], 0.0)
    return value, mass.log().masked_fill(none, float("-inf"))
