"""Performer attention (FAVOR+): softmax attention estimated by positive random features."""

from typing import Literal

import torch
from torch import Tensor

from polysketch import ops
from polysketch.attention.base import check_positive_int
from polysketch.attention.linearized import LinearizedAttention
from polysketch.feature_maps import PerformerFeatures


class PerformerAttention(LinearizedAttention):
    """o_i = sum_j w_ij v_j / sum_j w_ij, w_ij = phi(q_i) . phi(k_j) an estimate of exp(q_i . k_j / sqrt(head_dim)).

    Choromanski and others, "Rethinking Attention with Performers" (ICLR 2021), sections 2.2 to 2.4; phi, its constants
    and where they depart from published code: `PerformerFeatures`. One W a layer, for all heads.

    W is redrawn only where that is asked for: by `redraw_interval` in training, by `mechanism.feature_map.resample()`,
    the next draw of its seed, or by `.resample(generator)`. Draw number k depends on the seed and k, never on a
    generator that others use, and the seed of the next one is saved with W: a resumed run draws as one left alone.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        num_features: m; the error of a weight falls as 1 / sqrt(m) and grows exponentially with |q'|^2 and |k'|^2.
        kind: "softmax", or "relu" for the features relu(W x') instead, which estimate another kernel.
        seed: of W; None takes one from PyTorch's default generator. Layers with the same seed have the same W.
        redraw_interval: training steps between draws of W; None keeps the first. What decodes from a state of before
            a draw would mix features: start a new state.

    Raises:
        TypeError, ValueError: options of another type or out of range.

    Cost: 2 head_dim m operations for each query and key and about 4 m (value_dim + 1) for the sums, a token and head;
    the state is m (value_dim + 1) numbers per key/value head. Features and values are float32 inside, whatever the
    inputs, for features span a range that float16 does not have.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        num_features: int = 256,
        kind: Literal["softmax", "relu"] = "softmax",
        seed: int | None = None,
        redraw_interval: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads)
        if redraw_interval is not None:
            check_positive_int("redraw_interval", redraw_interval)
        self.redraw_interval = redraw_interval
        self.feature_map = PerformerFeatures(
            head_dim, num_features=num_features, kind=kind, seed=seed, num_kv_heads=self.num_kv_heads
        )

    def extra_repr(self) -> str:
        """Sizes and options; the map beside it names its own."""
        return f"{super().extra_repr()}, redraw_interval={self.redraw_interval}"

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
        return super().forward(query, key, _widened(value), causal=causal, key_mask=key_mask).to(value.dtype)

    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: ops.LinearAttentionState,
        *,
        key_mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, ops.LinearAttentionState]:
        """As `Mechanism.extend`; the cost of a token does not depend on how many came before."""
        output, state = super().extend(query, key, _widened(value), state, key_mask=key_mask)
        return output.to(value.dtype), state


def _widened(value: Tensor) -> Tensor:
    """In float32 at least: the op wants features and values in one dtype."""
    return value.to(torch.promote_types(value.dtype, torch.float32))
