"""A logit for each head and token, from the layer's input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch.feature_maps import lecun_normal_
from polysketch.ops.arguments import check_at_least_one
from polysketch.ops.autocast import without_autocast

_SPREAD = 0.6
_START = 0.1  # of the standard deviation of other projections: to begin with, biases decide


class HeadLogit(nn.Module):
    """u . hidden + b for each key/value head.

    Biases are spread over the heads by 0.6 to either side, so that each begins with a weight of its own. Logits are
    float32 or better, whatever the dtype of the parameters.

    Args:
        hidden_size: width of the layer's input; None for b alone, the same for every token.
        num_kv_heads: key and value heads.
        bias: the mean of the biases.
        name: of the bias, for messages.

    Raises:
        TypeError: a bias that is no number.
    """

    def __init__(self, hidden_size: int | None, num_kv_heads: int, bias: float, name: str) -> None:
        super().__init__()
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise TypeError(f"{name} must be a number, got {bias!r}")
        self.hidden_size, self.name = hidden_size, name
        spread = torch.linspace(-_SPREAD, _SPREAD, num_kv_heads) if num_kv_heads > 1 else torch.zeros(1)
        self.bias = nn.Parameter(bias + spread)
        if hidden_size is None:
            self.register_parameter("weight", None)
        else:
            check_at_least_one(hidden_size=hidden_size)
            self.weight = nn.Parameter(torch.empty(num_kv_heads, hidden_size))
            lecun_normal_(self.weight, hidden_size, scale=_START)

    @property
    def reads_hidden(self) -> bool:
        """Whether it depends on the layer's input."""
        return self.weight is not None

    def forward(self, hidden: Tensor | None) -> Tensor:
        """(batch, length, hidden_size) -> (batch, num_kv_heads, length); a constant is (1, num_kv_heads, 1).

        Raises:
            ValueError: no input where it is read, or one of another width.
        """
        dtype = torch.promote_types(self.bias.dtype, torch.float32)
        if self.weight is None:
            return self.bias.to(dtype)[None, :, None]
        hidden = self.checked(hidden)
        with without_autocast(hidden.device.type):
            return F.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).transpose(1, 2)

    def checked(self, hidden: Tensor | None) -> Tensor:
        """The layer's input, where it is read.

        Raises:
            ValueError: there is none, or it has another width.
        """
        if hidden is None or hidden.shape[-1] != self.hidden_size:
            found = "nothing" if hidden is None else f"{tuple(hidden.shape)}"
            raise ValueError(
                f"the logit around {self.name} needs hidden=(batch, length, {self.hidden_size}), got {found}"
            )
        return hidden

    def extra_repr(self) -> str:
        """Sizes."""
        return f"hidden_size={self.hidden_size}, num_kv_heads={self.bias.shape[0]}"
