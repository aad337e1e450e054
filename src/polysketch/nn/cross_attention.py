"""The projections around a mechanism whose queries are of one sequence and whose keys are of another."""

from typing import Any

import torch
from torch import Tensor, nn

from polysketch.attention import Mechanism
from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.nn.joined_linear import JoinedLinear
from polysketch.nn.norm_and_rotation import norm_and_rotate
from polysketch.nn.query_key_norm import QueryKeyNorm


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another, the source; no positions, no biases.

    Places in the two sequences do not correspond, so there are no rotary positions: the source's vectors have to carry
    what of positions matters.

    Args:
        hidden_size: width of input and output.
        source_size: width of the source's vectors.
        mechanism: what attends; one of which `is_cross` holds.
        query_key_norm: norm queries and keys (`QueryKeyNorm`).

    Raises:
        ValueError: a mechanism that needs queries and keys of the same tokens; the message lists those that do not.
    """

    def __init__(
        self, hidden_size: int, source_size: int, mechanism: Mechanism, *, query_key_norm: bool = False
    ) -> None:
        super().__init__()
        mechanism.require_cross()
        key_width = mechanism.num_kv_heads * mechanism.head_dim
        self.query = nn.Linear(hidden_size, mechanism.num_heads * mechanism.head_dim, bias=False)
        self.key_value = JoinedLinear(source_size, (key_width, key_width), bias=False)
        self.mechanism = mechanism
        self.output = nn.Linear(mechanism.num_heads * mechanism.head_dim, hidden_size, bias=False)
        self.query_norm = QueryKeyNorm(mechanism.num_heads, mechanism.head_dim) if query_key_norm else None
        self.key_norm = QueryKeyNorm(mechanism.num_kv_heads, mechanism.head_dim) if query_key_norm else None
        self.reset_parameters()

    def reset_parameters(self, residual_scale: float = 1.0) -> None:
        """Truncated normals of variance 1 / fan_in; the standard deviation of the output times `residual_scale`."""
        for linear in (self.query, self.key_value):
            lecun_normal_(linear.weight, linear.in_features)
        lecun_normal_(self.output.weight, self.output.in_features, scale=residual_scale)
        for norm in (self.query_norm, self.key_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(self, hidden: Tensor, source: Tensor, *, source_mask: Tensor | None = None) -> Tensor:
        """Every token attends to the whole source.

        Args:
            hidden: (batch, length, hidden_size).
            source: (batch, source length, source_size).
            source_mask: (batch, source length) bool, True for a real token.

        Returns:
            (batch, length, hidden_size).
        """
        key, value = self._keys(source)
        attended = self.mechanism(self._queries(hidden), key, value, causal=False, key_mask=source_mask)
        return self._joined(attended)

    @torch.no_grad()
    def read_source(self, source: Tensor, *, source_mask: Tensor | None = None) -> Any:
        """What `ask_source` needs of the source, made once: see `Mechanism.read_source`.

        Args:
            source, source_mask: as for `forward`.
        """
        key, value = self._keys(source)
        return self.mechanism.read_source(key, value, key_mask=source_mask)

    @torch.no_grad()
    def ask_source(self, hidden: Tensor, source: Any) -> Tensor:
        """`forward` of a source that was read before, for any number of tokens at a time.

        Args:
            hidden: as for `forward`.
            source: from `read_source`.
        """
        return self._joined(self.mechanism.ask_source(self._queries(hidden), source))

    def _queries(self, hidden: Tensor) -> Tensor:
        return norm_and_rotate(self._heads(self.query(hidden)), self.query_norm, None)[1]

    def _keys(self, source: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self._heads(self.key_value(source)).chunk(2, 1)
        return norm_and_rotate(key, self.key_norm, None)[1], value

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.mechanism.head_dim)).transpose(1, 2)

    def _joined(self, attended: Tensor) -> Tensor:
        return self.output(attended.transpose(1, 2).flatten(2))
