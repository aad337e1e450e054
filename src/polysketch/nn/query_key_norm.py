"""Root mean square norm of the queries and keys of every head, before rotary positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch.ops.autocast import without_autocast


class QueryKeyNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-5) * g over the channels of a head; g is learned, a factor a channel of every head.

    The norm of queries and keys bounds the logits of softmax, so that a model bears higher learning rates (Dehghani et
    al., arXiv 2302.05442). As in Qwen 3 and Gemma 3 it takes no mean away. Then rotary positions,
    which follow, keep what it made: the length of a vector. And a layer norm within a mechanism gives the same of a
    vector whatever its length: at the start those mechanisms compute what they compute without this norm. Here every
    head has factors of its own, where those models share them between heads.

    Args:
        num_heads: heads of queries and of keys together.
        head_dim: channels of a head.
    """

    eps = 1e-5
    """Added to the mean square."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.scale = nn.Parameter(torch.empty(num_heads * head_dim))  # one axis, as every gain: no weight decay
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Factors of 1."""
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, num_heads, length, head_dim) -> the same shape and dtype; computed in float32 or better."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        scale = self.scale.view(self.num_heads, 1, self.head_dim)
        with without_autocast(x.device.type):
            normed = F.rms_norm(x.to(dtype), (self.head_dim,), eps=self.eps) * scale.to(dtype)
        return normed.to(x.dtype)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}"
