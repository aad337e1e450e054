"""Polysketch attention around a window, with a large memory that sparse sketches address: the delta rule, few cells."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from polysketch import ops
from polysketch.attention.delta_beside_window import DeltaBesideWindow
from polysketch.attention.span_state import Following, SpanState
from polysketch.feature_maps import SparseSketches


class PolysketchMemoryAttention(DeltaBesideWindow):
    """One softmax over the last `window` tokens and over what a memory recalls of all tokens before them.

        o_i = (sum_near e_ij v_j + exp(l_i) r_i) / (sum_near e_ij + exp(l_i))
        e_ij = exp(c q^_i . k^_j / sqrt(head_dim))
        S_j = S_{j-1} + s_j phi(k_j) (v_j - S_{j-1}^T phi(k_j))^T,  r_i = S_{i-window}^T phi(q_i)
        l_i = u . hidden_i + b + g m_i

    As `polysketch`, with other features: phi is the product of two sketches of `sketch_size` numbers of which all
    but `kept` are zero (`SparseSketches`). So S has sketch_size^2 rows, and a token reads and writes kept^2 of them
    (`ops.delta_memory`): tokens disturb each other less than in a small dense S, and each costs less. Features are
    taken of queries and keys before rotary positions, where the layer gives them. A replaced layer of transformers
    gives them within rounding: it turns rotated ones back.

    The window and the sketches' products are PolySketchFormer's (section 3.2, with a sliding window in place of aligned
    chunks and softmax weights in place of polynomials); the rule of writing is that of Schlag et al. (ICML 2021,
    section 4.2), the short codes are those of Lample et al. (NeurIPS 2019).

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        window: tokens with exact weights, the token itself included.
        sketch_size: numbers of each of the two sketches; the memory grows as its square.
        kept: of them that are not zero; the time of the memory grows as its square.
        far_bias: the mean of the biases b, spread over the heads by 0.6 to either side.
        hidden_size: width of the layer's input, for u and w; None where l_i and s_j do not depend on it.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range.

    Cost, a token and head: 2 (head_dim + value_dim) (window + 31) operations in the window by the native program and
    more by others, and 6 kept^2 (value_dim + 1) for the memory. Tokens are written in order: only heads and rows of the
    batch are independent. The state is sketch_size^2 (value_dim + 1) numbers a key/value head, and window (head_dim +
    value_dim + 4 kept + 1) of the window. It is causal only.
    """

    feature_map: SparseSketches
    is_bidirectional = False
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"window": 8, "sketch_size": 10, "kept": 6, "far_bias": 1.2},)

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        window: int = 256,
        sketch_size: int = 64,
        kept: int = 8,
        far_bias: float = -2.0,
        hidden_size: int | None = None,
    ) -> None:
        sizes = {"sketch_size": sketch_size, "kept": kept}
        super().__init__(
            num_heads,
            head_dim,
            num_kv_heads,
            window=window,
            feature_map=SparseSketches(head_dim, **sizes, num_kv_heads=num_kv_heads or num_heads),
            far_bias=far_bias,
            hidden_size=hidden_size,
        )

    def _map_both(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Cells, as numbers that any dtype holds exactly, and weights."""
        return self._packed(query), self._packed(key)

    def _packed(self, x: Tensor) -> Tensor:
        cells, weights = self.feature_map.sparse(x)
        return torch.cat([cells.to(weights.dtype), weights], -1)

    def _answers(
        self, query_features: Tensor, key_features: Tensor, value: Tensor, strength: Tensor, state: Any
    ) -> Tensor:
        """By `ops.delta_memory`."""
        query, key = _unpacked(query_features), _unpacked(key_features)
        if state is None:
            return ops.delta_memory(*query, *key, value, strength, size=self.feature_map.sketch_size)
        if isinstance(state, Following):
            recalled, state.state = ops.delta_memory_after(*query, *key, value, strength, state.state)
            return recalled
        return ops.delta_memory_extend_(*query, *key, value, strength, state)

    @property
    def kept_width(self) -> int:
        """Cells and weights of both sketches, and the strength of writing."""
        return 4 * self.feature_map.kept + 1

    def _sum_tensors(self, sums: Any) -> dict[str, Tensor]:
        return {"sums": sums.sums}

    def _sums_of(self, state: SpanState) -> Any:
        return ops.DeltaMemoryState(state.tensors["sums"], self.feature_map.sketch_size)

    def _empty_sums(
        self, rows: tuple[int, int], value_dim: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> ops.DeltaMemoryState:
        return ops.DeltaMemoryState.init(*rows, self.feature_map.sketch_size, value_dim, device=device, dtype=dtype)


def _unpacked(features: Tensor) -> tuple[Tensor, Tensor]:
    """What `_packed` put together."""
    cells, weights = features.chunk(2, -1)
    return cells.detach().to(torch.int32), weights
