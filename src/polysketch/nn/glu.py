"""The gated linear unit (Shazeer 2020) with a tanh-GELU gate, the feed-forward layer of the models."""

from torch import Tensor, nn

from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.nn.joined_linear import JoinedLinear
from polysketch.ops.gated_gelu import gated_gelu


def gated_width(hidden_size: int) -> int:
    """The inner width of the papers' models: 8/3 of `hidden_size`, rounded down to a multiple of 8."""
    return max(8, 8 * hidden_size // 3 // 8 * 8)


class GatedLinearUnit(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x)), without biases.

    The text of PolySketchFormer says expansion 4; its parameter counts and code mean 8/3, the default here.

    Args:
        hidden_size: width of input and output.
        inner_size: width between; `gated_width(hidden_size)` when None.
    """

    def __init__(self, hidden_size: int, inner_size: int | None = None) -> None:
        super().__init__()
        inner_size = gated_width(hidden_size) if inner_size is None else inner_size
        self.gate_up = JoinedLinear(hidden_size, (inner_size, inner_size), bias=False)
        self.down = nn.Linear(inner_size, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self, residual_scale: float = 1.0) -> None:
        """Truncated normals of variance 1 / fan_in; the standard deviation of the output times `residual_scale`."""
        lecun_normal_(self.gate_up.weight, self.gate_up.in_features)
        lecun_normal_(self.down.weight, self.down.in_features, scale=residual_scale)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., hidden_size)."""
        return self.down(gated_gelu(self.gate_up(hidden)))
