"""Focused linear attention (FLatten)."""

from polysketch.attention.convolved import ConvolvedAttention
from polysketch.feature_maps import FocusedFeatures


class FocusedAttention(ConvolvedAttention):
    """o_i = sum_j w_ij v_j / (sum_j w_ij + 1e-6 n_i) + b + sum_t c_t v_{i + t}, w_ij = phi(q_i) . phi(k_j).

    n_i is the number of keys that i sees: the paper's z = 1 / (phi(q) . mean phi(k) + 1e-6), for sums. phi raises the
    entries of relu(x) to a power and keeps the length of the whole (`FocusedFeatures`: norms over all heads of a token
    together). Causal, the convolution is over the last `convolution_size` values, the own one included, which decoding
    carries along; bidirectional, over a sequence, over as many values on both sides (an odd size); over a `grid`, two-
    dimensional as in the paper.

    FLatten (Han, Pan, Han, Song and Huang, "FLatten Transformer: Vision Transformer using Focused Linear Attention",
    ICCV 2023), sections 3.3 and 3.4. Departures: causal use; no learned position embeddings on keys; the scale of
    channels is per key/value head.

    Args:
        num_heads, head_dim, num_kv_heads: as for `Mechanism`.
        focus: the power, 3 in the paper.
        convolution_size: taps of the convolution, or of its side on a grid.
        grid: (height, width) of a picture in tokens, row by row: bidirectional only.
        class_tokens: tokens before that picture, such as a class token: attended to, and not convolved.

    Raises:
        TypeError, ValueError: options of another type or out of range.

    Cost: 4 head_dim (value_dim + 2) operations a token and head and `convolution_size` (on a grid its square)
    multiply-adds a value. The state is head_dim (head_dim + 2) + (convolution_size - 1) head_dim numbers for each
    key/value head. Features, values and sums are float32 inside, whatever the inputs.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        focus: float = 3.0,
        convolution_size: int = 5,
        grid: tuple[int, int] | None = None,
        class_tokens: int = 0,
    ) -> None:
        super().__init__(
            num_heads,
            head_dim,
            num_kv_heads,
            convolution_size=convolution_size,
            grid=grid,
            class_tokens=class_tokens,
        )
        self.feature_map = FocusedFeatures(head_dim, focus=focus, num_kv_heads=self.num_kv_heads)
