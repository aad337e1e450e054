"""The projections around an attention mechanism."""

from typing import Any

import torch
from torch import Tensor, nn

from polysketch.attention import Mechanism
from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.nn.mixer import TokenMixer
from polysketch.nn.rope import Rotation, apply_rotation


class MultiHeadAttention(TokenMixer):
    """Projections to query, key and value, rotary positions, a mechanism, and the output projection; no biases.

    Rotary positions come before the mechanism, and so before its layer norms of queries and keys, if it has any.

    Args:
        hidden_size: width of input and output.
        mechanism: what attends; the numbers of heads and their width are its own.
    """

    def __init__(self, hidden_size: int, mechanism: Mechanism) -> None:
        super().__init__()
        query_width = mechanism.num_heads * mechanism.head_dim
        key_width = mechanism.num_kv_heads * mechanism.head_dim
        self.query_key_value = nn.Linear(hidden_size, query_width + 2 * key_width, bias=False)
        self.mechanism = mechanism
        self.output = nn.Linear(query_width, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self, residual_scale: float = 1.0) -> None:
        """Truncated normals of variance 1 / fan_in; the standard deviation of the output times `residual_scale`."""
        lecun_normal_(self.query_key_value.weight, self.query_key_value.in_features)
        lecun_normal_(self.output.weight, self.output.in_features, scale=residual_scale)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None = None,
        *,
        causal: bool = True,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend over a whole sequence; as `TokenMixer.forward`."""
        query, key, value = self.project(hidden, rotation)
        attended = self.mechanism(query, key, value, causal=causal, key_mask=key_mask, hidden=hidden)
        return self.output(_merge_heads(attended))

    def init_state(
        self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """The mechanism's state before the first token."""
        return self.mechanism.init_state(batch_size, device, dtype)

    def extend(
        self, hidden: Tensor, state: Any, rotation: Rotation | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Attend from new tokens to all tokens so far; arguments as for `forward`, the state as for the mechanism."""
        query, key, value = self.project(hidden, rotation)
        attended, state = self.mechanism.extend(query, key, value, state, key_mask=key_mask, hidden=hidden)
        return self.output(_merge_heads(attended)), state

    def why_not_captured(self, state: Any) -> str | None:
        """The mechanism's own answer."""
        return self.mechanism.why_not_captured(state)

    def project(self, hidden: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """What the mechanism is given: (batch, heads, length, head_dim) query, key and value, the first two rotated."""
        heads = self.query_key_value(hidden).unflatten(-1, (-1, self.mechanism.head_dim)).transpose(1, 2)
        num_heads, num_kv_heads = self.mechanism.num_heads, self.mechanism.num_kv_heads
        rotated, value = heads.split((num_heads + num_kv_heads, num_kv_heads), 1)
        if rotation is not None:
            rotated = apply_rotation(rotated, rotation)
        query, key = rotated.split((num_heads, num_kv_heads), 1)
        return query, key, value


def _merge_heads(attended: Tensor) -> Tensor:
    """(batch, heads, length, head_dim) -> (batch, length, heads * head_dim)."""
    return attended.transpose(1, 2).flatten(2)
