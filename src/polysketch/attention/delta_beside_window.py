"""The delta rule beside a window: sums that correct themselves, and how far a query trusts what they recall."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch.attention.beside_window import BesideWindow, without_masked
from polysketch.attention.head_logit import HeadLogit
from polysketch.attention.linearized import widened
from polysketch.feature_maps import FeatureMap

_CONFIDENCE = 3.0


class DeltaBesideWindow(BesideWindow):
    """One softmax over the last `window` tokens and over what sums recall of all tokens before them.

        S_j = S_{j-1} + s_j phi(k_j) (v_j - S_{j-1}^T phi(k_j))^T,  r_i = S_{i-window}^T phi(q_i)
        l_i = u . hidden_i + b + g m_i

    m_i is what the sums recall of a value of one, and s_j = sigmoid(w . hidden_j + d). u, b, g, w and d are those of
    the key/value head. A subclass says which features there are (`_map_both`) and how the sums answer (`_answers`).

    Args:
        num_heads, head_dim, num_kv_heads, window, feature_map, far_bias, hidden_size: as for `BesideWindow`.
    """

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
    ) -> None:
        super().__init__(
            num_heads,
            head_dim,
            num_kv_heads,
            window=window,
            feature_map=feature_map,
            far_bias=far_bias,
            hidden_size=hidden_size,
        )
        self.strength_logit = HeadLogit(hidden_size, self.num_kv_heads, 0.0, "strength_bias")
        self.confidence_scale = nn.Parameter(torch.full((self.num_kv_heads,), _CONFIDENCE))

    def _map_both(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Features of queries and keys, as `_answers` takes them; zeros are a token that has none."""
        return self.feature_map.map_both(query, key)

    def _answers(
        self, query_features: Tensor, key_features: Tensor, value: Tensor, strength: Tensor, state: Any
    ) -> Tensor:
        """What the sums answer each query once its token is written; `state` as for `_recall`."""
        raise NotImplementedError(f"{type(self).__name__} has no sums")

    @property
    def sums_width(self) -> int:
        """Behind every value stands a one."""
        return 1

    @property
    def kept_width(self) -> int:
        """Behind the features stands the strength of writing."""
        return super().kept_width + 1

    def _features(
        self,
        vectors: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        key_mask: Tensor | None,
        hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Features, behind those of keys the strength of writing; zeros of masked keys, which write nothing."""
        query_features, key_features = self._map_both(*vectors)
        strength = self.strength_logit(hidden).sigmoid()[..., None]
        strength = strength.expand(*key_features.shape[:3], 1).to(key_features.dtype)
        kept = torch.cat([key_features, strength], -1)
        return query_features.to(dtype), without_masked(kept, key_mask).to(dtype)

    def _recall(
        self,
        query_features: Tensor,
        left: Tensor,
        value: Tensor,
        log_decay: Tensor | None,
        state: Any,
    ) -> tuple[Tensor, Tensor]:
        """What the sums answer, and their confidence in it; -inf where nothing was written."""
        query_features, left = widened(query_features), widened(left)  # errors of half precision would add up
        value = F.pad(widened(value), (0, 1), value=1.0)
        found = self._answers(query_features, left[..., :-1], value, left[..., -1], state)
        recalled, confidence = found[..., :-1], found[..., -1]
        scale = self.confidence_scale.to(found.dtype).repeat_interleave(self.num_heads // self.num_kv_heads)
        logit = (scale[:, None] * confidence).masked_fill(confidence == 0.0, float("-inf"))
        return recalled, logit
