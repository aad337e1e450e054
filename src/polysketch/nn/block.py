"""A transformer block: normalise, attend, add; normalise, feed forward, add."""

from typing import Any

from torch import Tensor, nn

from polysketch.attention import Mechanism
from polysketch.nn.glu import GatedLinearUnit
from polysketch.nn.multihead import MultiHeadAttention
from polysketch.nn.rope import Rotation


class TransformerBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + feedforward(norm(x)).

    Args:
        hidden_size: width of the residual stream.
        mechanism: what attends.
        feedforward_size: inner width of the gated linear unit; 8/3 of `hidden_size` when None.
        norm_epsilon: of the layer norms, which have scale and bias.
    """

    def __init__(
        self,
        hidden_size: int,
        mechanism: Mechanism,
        *,
        feedforward_size: int | None = None,
        norm_epsilon: float = 1e-5,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size, eps=norm_epsilon)
        self.attention = MultiHeadAttention(hidden_size, mechanism)
        self.feedforward_norm = nn.LayerNorm(hidden_size, eps=norm_epsilon)
        self.feedforward = GatedLinearUnit(hidden_size, feedforward_size)

    def reset_parameters(self, residual_scale: float = 1.0) -> None:
        """Initialise the projections; outputs added to the residual stream are scaled by `residual_scale`."""
        self.attention.reset_parameters(residual_scale)
        self.feedforward.reset_parameters(residual_scale)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation | None = None,
        *,
        causal: bool = True,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """(batch, length, hidden_size) -> the same; arguments as for `MultiHeadAttention.forward`."""
        normalized = self.attention_norm(hidden)
        hidden = hidden + self.attention(normalized, rotation, causal=causal, key_mask=key_mask)
        return hidden + self.feedforward(self.feedforward_norm(hidden))

    def extend(
        self, hidden: Tensor, state: Any, rotation: Rotation | None = None, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The block for new tokens that follow those in `state`, which is updated in place."""
        attended, state = self.attention.extend(self.attention_norm(hidden), state, rotation, key_mask=key_mask)
        hidden = hidden + attended
        return hidden + self.feedforward(self.feedforward_norm(hidden)), state

    def attention_inputs(self, hidden: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The query, key and gate input (batch, length, hidden_size) of the mechanism, for calibration and reports."""
        normalized = self.attention_norm(hidden)
        query, key, _ = self.attention.project(normalized, rotation)
        return query, key, normalized
