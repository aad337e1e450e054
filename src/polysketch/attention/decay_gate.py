"""A data-dependent decay of linearised weights, one rate per key/value head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch.feature_maps import lecun_normal_
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.autocast import without_autocast

_BIAS_RANGE = (3.0, 8.0)  # heads forget over about e^3 = 20 to e^8 = 3,000 tokens to begin with


class DecayGate(nn.Module):
    """log_decay = log sigmoid(w . hidden + b) for each key/value head.

    The papers have no such gate. Its biases are spread over the heads from 3 (fast) to 8 (slow). Logits are float32 or
    better, whatever the dtype of the weights.

    Args:
        hidden_size: width of the layer's input.
        num_kv_heads: key and value heads.
    """

    def __init__(self, hidden_size: int, num_kv_heads: int) -> None:
        super().__init__()
        check_at_least_one(hidden_size=hidden_size)
        self.hidden_size = hidden_size
        self.weight = nn.Parameter(torch.empty(num_kv_heads, hidden_size))
        self.bias = nn.Parameter(torch.linspace(*_BIAS_RANGE, num_kv_heads))
        lecun_normal_(self.weight, hidden_size)

    def forward(self, hidden: Tensor | None) -> Tensor:
        """(batch, length, hidden_size) -> (batch, num_kv_heads, length), at most 0, float32 or better.

        Raises:
            ValueError: no input, or one of another width.
        """
        if hidden is None or hidden.shape[-1] != self.hidden_size:
            found = "nothing" if hidden is None else f"{tuple(hidden.shape)}"
            raise ValueError(f"a gated mechanism needs hidden=(batch, length, {self.hidden_size}), got {found}")
        # A slow head's decay is 3e-4 a token: logits in half precision would be wrong by some per cent of it.
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        with without_autocast(hidden.device.type):
            logits = F.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
            return F.logsigmoid(logits).transpose(1, 2)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"hidden_size={self.hidden_size}, num_kv_heads={self.weight.shape[0]}"
