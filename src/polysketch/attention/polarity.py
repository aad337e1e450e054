"""Polarity-aware linear attention (PolaFormer)."""

import torch
from torch import Tensor

from polysketch.attention.convolved import ConvolvedAttention
from polysketch.attention.output_gate import OutputGate
from polysketch.feature_maps import PolarityFeatures


class PolarityAttention(ConvolvedAttention):
    """o_i = g_i * ([same_i, opposite_i] + b + sum_t c_t v_{i + t}), g = W hidden.

        same_i     = sum_j s_ij v1_j / (sum_j s_ij + 1e-6 n_i)    s_ij = q+_i . k+_j + q-_i . k-_j
        opposite_i = sum_j r_ij v2_j / (sum_j r_ij + 1e-6 n_i)    r_ij = q+_i . k-_j + q-_i . k+_j

    v1 and v2 are the first and the second half of the value's channels (of an odd number the first has one more), n_i
    the number of keys that i sees: the paper's z = 1 / (q . mean k + 1e-6), for sums. x+ and x- are the positive and
    the negative part, each to a learned power (`PolarityFeatures`). The convolution is as in `FocusedAttention`.

    PolaFormer (Meng, Luo, Li, Jiang and Zhang, "PolaFormer: Polarity-aware Linear Attention for Vision Transformers",
    ICLR 2025). The paper's learned matrices that mix the signs are this gate in its code: linear, nothing around it.
    Departures: the gate is off unless asked for, as it needs the layer's input; causal use; no learned position
    embeddings on keys; the scale and the powers of channels are per key/value head.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        convolution_size: taps of the convolution, or of its side on a grid; odd where it is not causal.
        grid: (height, width) of a picture in tokens, row by row: bidirectional only.
        class_tokens: tokens before that picture, such as a class token: attended to, and not convolved.
        output_gate: the paper's gate on the output, for every channel of every query head; needs `hidden_size`.
        hidden_size: width of the layer's input, for the gate.

    Raises:
        TypeError, ValueError: options of another type or out of range, or a gate without `hidden_size`.

    Cost: 8 head_dim (value_dim + 4) operations a token and head and `convolution_size` (on a grid its square)
    multiply-adds a value; the gate hidden_size * value_dim. The state is 2 head_dim (head_dim + 4) +
    (convolution_size - 1) head_dim numbers for each key/value head. Features, values and sums are float32 inside.
    """

    feature_map: PolarityFeatures
    output_gate: OutputGate | None
    parts = 2

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        convolution_size: int = 5,
        grid: tuple[int, int] | None = None,
        class_tokens: int = 0,
        output_gate: bool = False,
        hidden_size: int | None = None,
    ) -> None:
        _check_gate(output_gate, hidden_size)
        super().__init__(
            num_heads,
            head_dim,
            num_kv_heads,
            convolution_size=convolution_size,
            grid=grid,
            class_tokens=class_tokens,
        )
        self.feature_map = PolarityFeatures(head_dim, num_kv_heads=self.num_kv_heads)
        self.output_gate = None
        if output_gate and hidden_size is not None:
            self.output_gate = OutputGate(hidden_size, num_heads, head_dim)

    @property
    def reads_hidden(self) -> bool:
        """Whether there is a gate."""
        return self.output_gate is not None

    def features_of_parts(self, query_features: Tensor, key_features: Tensor) -> tuple[Tensor, Tensor]:
        """The query's features, then those of its opposite; the key's twice."""
        opposed = self.feature_map.opposed(query_features)
        return torch.cat([query_features, opposed], 1), torch.cat([key_features, key_features], 1)

    def finish(self, attended: Tensor, convolved: Tensor, hidden: Tensor | None) -> Tensor:
        """Their sum, times the gate.

        Raises:
            ValueError: a gate without `hidden`, or with one of another width.
        """
        output = super().finish(attended, convolved, hidden)
        return output if self.output_gate is None else self.output_gate(output, hidden)


def _check_gate(output_gate: bool, hidden_size: int | None) -> None:
    if not isinstance(output_gate, bool):
        raise TypeError(f"output_gate must be True or False, got {output_gate!r}")
    if output_gate and hidden_size is None:
        raise ValueError("output_gate=True needs hidden_size, the width of the layer's input")
