"""Exact polynomial attention of degree two or four in linear time: the yardstick of every sketch."""

from typing import Any, Literal

import torch
from torch import Tensor

from polysketch.attention.base import head_norm
from polysketch.attention.linearized import LinearizedAttention
from polysketch.feature_maps import FeatureMap, Identity, SymmetricSquare
from polysketch.ops.arguments import check_at_least_one

_MAPS: dict[int, type[FeatureMap]] = {2: Identity, 4: SymmetricSquare}


class SymmetricPowerAttention(LinearizedAttention):
    """o_i = sum_j w_ij v_j / (1 + sum_j w_ij), w_ij = <LN(q_i), LN(k_j)>^degree, exactly, in time linear in the length.

    The function, its norms and its parameters are those of `PolynomialAttention` (PolySketchFormer, section 2.1). The
    features are x at degree 2 and packed x (x) x at degree 4; the op squares their products. There is no
    1/sqrt(head_dim).

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        degree: 2, or 4 for small heads.

    Raises:
        TypeError: a degree that is not an integer.
        ValueError: another degree, or at degree 4 a head wider than 64.

    Cost: with m = head_dim features at degree 2 and head_dim (head_dim + 1) / 2 at 4, 2 m^2 (value_dim + 1) operations
    a token and head, and a state of m^2 / 2 (value_dim + 1) numbers for each key/value head. At degree 4 that grows
    as head_dim^5: 0.6 MB of float32 a head at head_dim 16, 18 MB at 32, 563 MB at 64.
    """

    offset = 1.0

    def __init__(
        self, num_heads: int, head_dim: int, num_kv_heads: int | None = None, *, degree: Literal[2, 4] = 2
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        check_at_least_one(degree=degree)
        if degree not in _MAPS:
            raise ValueError(f"degree must be one of {', '.join(map(str, _MAPS))}, got {degree}")
        self.degree = degree
        self.feature_map = _MAPS[degree](head_dim, num_kv_heads=self.num_kv_heads)
        self.query_norm, self.key_norm = head_norm(head_dim), head_norm(head_dim)

    def operands(
        self, query: Tensor, key: Tensor, dtype: torch.dtype, hidden: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """As `LinearizedAttention.operands`, of the layer-normed query and key."""
        return super().operands(self.query_norm(query), self.key_norm(key), dtype, hidden)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, degree={self.degree}"
