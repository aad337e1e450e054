"""Polysketch attention around a window, with sums that correct themselves: the delta rule on products of sketches."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch import ops
from polysketch.attention.beside_window import BesideWindow, sketched_width
from polysketch.attention.head_logit import HeadLogit
from polysketch.attention.linearized import widened
from polysketch.attention.masked import without_masked
from polysketch.attention.span_state import Following
from polysketch.attention.window_state import WindowState
from polysketch.feature_maps import SketchProducts
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.custom_op import refuse_tangents
from polysketch.ops.delta import one_token

_CONFIDENCE = 3.0


class PolysketchAttention(BesideWindow):
    """One softmax over the last `window` tokens and over what sums recall of all tokens before them.

        o_i = (sum_near e_ij v_j + exp(l_i) r_i) / (sum_near e_ij + exp(l_i))
        e_ij = exp(c q^_i . k^_j / sqrt(head_dim))
        S_j = S_{j-1} + s_j phi(k_j) (v_j - S_{j-1}^T phi(k_j))^T,  r_i = S_{i-window}^T phi(q_i)
        l_i = u . hidden_i + b + g m_i

    near are the last `window` tokens, the token itself included. q^ and k^ are queries and keys of root mean square
    one, and c is a learned scale. A token that leaves the window is written into the sums S by the delta rule: the sums
    are asked for its key, and what they answer is moved toward its value by the share s_j = sigmoid(w . hidden_j + d).
    So tokens with other keys stay as they are, and one key's newest value takes the place of its older ones. Sums that
    only add cannot do either. m_i is what the sums recall of a value of one: about 1 where a key like the query was
    written, about 0 where not. So the query sees whether to trust r_i. c, u, b, g, w and d are those of the key/value
    head.

    phi are products of two learned sketches (`SketchProducts`) of queries and keys before rotary positions, where the
    layer gives them. A replaced layer of transformers gives them within rounding: it turns rotated ones back.

    The window and the sketches' products are PolySketchFormer's (section 3.2, with a sliding window in place of aligned
    chunks and softmax weights in place of polynomials); the sums are those of Schlag et al. (ICML 2021, section 4.2).

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        window: tokens with exact weights, the token itself included.
        sketch_size: r, of each of the two sketches; sums and time grow as r^2.
        far_bias: the mean of the biases b, spread over the heads by 0.6 to either side.
        hidden_size: width of the layer's input, for u and w; None where l_i and s_j do not depend on it.
        normed: whether q^ and k^ have a norm. Without it, and c of one, the weights of the window are those of softmax
            attention with the same queries and keys: for models that were trained with it.
        sketched: what the sketches are of: queries and keys "unrotated", "rotated", or "both" one behind the other. A
            model that was trained with softmax finds its far tokens by rotated ones.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range.

    Cost, a token and head: 2 (head_dim + value_dim) (window + 31) operations in the window by the native program and
    more by others, and for the sums 6 r^2 (value_dim + 1) by the native program, less in short sequences
    (`ops.delta_attention`), 8 r^2 (value_dim + 1) by others. Tokens are written in order: only heads and rows of the
    batch are independent. The state is r^2 (value_dim + 1) numbers a key/value head, and window (head_dim + value_dim +
    2 r + 1) of the window. It is causal only.
    """

    is_bidirectional = False
    recalls_by_pairs = True
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"window": 8, "sketch_size": 4, "far_bias": 1.3},
        {"window": 8, "sketch_size": 4, "far_bias": 1.3, "normed": False, "sketched": "both"},
    )
    after_softmax: ClassVar[Mapping[str, Any]] = {"normed": False, "sketched": "both"}

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        window: int = 256,
        sketch_size: int = 32,
        far_bias: float = 2.0,
        hidden_size: int | None = None,
        normed: bool = True,
        sketched: Literal["unrotated", "rotated", "both"] = "unrotated",
    ) -> None:
        check_at_least_one(sketch_size=sketch_size)
        width = sketched_width(head_dim, sketched)
        super().__init__(
            num_heads,
            head_dim,
            num_kv_heads,
            window=window,
            feature_map=SketchProducts(width, sketch_size=sketch_size, num_kv_heads=num_kv_heads or num_heads),
            far_bias=far_bias,
            hidden_size=hidden_size,
            normed=normed,
            sketched=sketched,
        )
        self.strength_logit = HeadLogit(hidden_size, self.num_kv_heads, 0.0, "strength_bias")
        self.confidence_scale = nn.Parameter(torch.full((self.num_kv_heads,), _CONFIDENCE))

    @property
    def sums_width(self) -> int:
        """Behind every value stands a one."""
        return 1

    @property
    def kept_width(self) -> int:
        """Behind the features stands the strength of writing."""
        return super().kept_width + 1

    def why_not_sums_in(self, dtype: torch.dtype) -> str | None:
        """As `Mechanism.why_not_sums_in`: what is written corrects what was rounded, and is no larger than values."""
        return None

    def _features(
        self,
        vectors: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        key_mask: Tensor | None,
        hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Features, behind those of keys the strength of writing; zeros of masked keys, which write nothing."""
        query_features, key_features = self.feature_map.map_both(*vectors)
        strength = self.strength_logit(hidden).sigmoid()[..., None]
        strength = strength.expand(*key_features.shape[:3], 1).to(key_features.dtype)
        kept = torch.cat([key_features, strength], -1)
        # Features of a masked key, which is zeros, are zeros; its gradient ends here, for at zero it would be huge.
        return query_features.to(dtype), without_masked(kept, key_mask).to(dtype)

    def _extend_by_program(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: WindowState,
        hidden: Tensor | None,
        unrotated: tuple[Tensor, Tensor] | None,
    ) -> Tensor | None:
        """As `BesideWindow._extend_by_program`, on a CPU."""
        held = state.recent.held
        if held is None or not isinstance(self.feature_map, SketchProducts):
            return None
        self._check_state(query, value, state)
        given = self.far_logit.checked(hidden) if self.reads_hidden else query[:, 0, :, :0]
        token = one_token.Token(query, key, value, *self._sketched(query, key, unrotated, None), given)
        ring = one_token.Ring(*held, state.recent.position, state.recent.rows)
        weights = one_token.Weights(
            self.feature_map.weight,
            self.strength_logit.weight,
            self.strength_logit.bias,
            self.far_logit.weight,
            self.far_logit.bias,
            self.confidence_scale,
            self.unit_scale.log_scale,
        )
        if not one_token.takes(token, weights, ring, state.far):
            return None
        refuse_tangents("extend", *token)
        removed, normed = self.prefix_removed, self.unit_scale.normed
        output = one_token.extend_one_(token, weights, ring, state.far, normed=normed, removed=removed)
        state.recent.count_one()
        return output

    def _recall(
        self,
        query_features: Tensor,
        left: Tensor,
        value: Tensor,
        log_decay: Tensor | None,
        state: ops.LinearAttentionState | ops.StateRows | Following | None,
    ) -> tuple[Tensor, Tensor]:
        """What the sums answer, and their confidence in it; -inf where nothing was written."""
        value = F.pad(widened(value), (0, 1), value=1.0)  # what tokens write is never in half precision
        found = _answers(query_features, left[..., :-1], value, left[..., -1], state)
        recalled, confidence = found[..., :-1], found[..., -1]
        scale = self.confidence_scale.to(found.dtype).repeat_interleave(self.num_heads // self.num_kv_heads)
        logit = (scale[:, None] * confidence).masked_fill(confidence == 0.0, float("-inf"))
        return recalled, logit


def _answers(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    strength: Tensor,
    state: ops.LinearAttentionState | ops.StateRows | Following | None,
) -> Tensor:
    """What the sums answer each query once its token is written."""
    if state is None:
        return ops.delta_attention(query_features, key_features, value, strength, factors=2)
    if isinstance(state, Following):
        return state.recall(query_features, key_features, value, strength, factors=2)
    return ops.delta_attention_extend_(query_features, key_features, value, strength, state, factors=2)
