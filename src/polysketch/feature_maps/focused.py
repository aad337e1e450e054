"""Focused features (FLatten): non-negative vectors turned towards their largest entries, at the same length."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polysketch.feature_maps.base import FeatureMap
from polysketch.ops.autocast import without_autocast

_RELU_EPSILON = 1e-6


class ChannelScale(nn.Module):
    """x / softplus(s), with an s for every channel of every key/value head, shared by queries and keys.

    s starts at zero, so that everything is divided by log 2 at first. Query heads take the scales of the key/value head
    that serves them.

    Args:
        num_kv_heads: key and value heads.
        head_dim: channels of a head.
    """

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_kv_heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) -> (batch, num_kv_heads, heads / num_kv_heads, length, head_dim), as x."""
        grouped = x.unflatten(1, (self.weight.shape[0], -1))
        return grouped / F.softplus(self.weight.to(x.dtype))[:, None, None]


class FocusedFeatures(FeatureMap):
    """phi(x) = |y| y^p / |y^p|, y = (relu(x) + 1e-6) / softplus(s), y^p entry by entry.

    FLatten (Han, Pan, Han, Song and Huang, "FLatten Transformer", ICCV 2023), section 3.3. phi keeps the length of y
    and turns it towards its largest entries; a larger p turns it more. The norms are over all channels of all heads of
    a token together: the paper applies phi before it splits the heads. A head whose entries are smaller than those of
    the others is made smaller still. Grouped queries make as many vectors of a token as there are query heads to a
    key/value head. Each has one query head of every key/value head, and so the channels of the key's vector. (The
    length of a query's vector cancels in a normalized output but for the 1e-6 in its denominator.)

    Not taken over: learned position embeddings added to keys, which tie a layer to one length.

    Args:
        head_dim: width of one head, and of the features.
        focus: p, 3 in the paper; from 1 on, and at 1 phi(x) = y.
        num_kv_heads: key and value heads; the scales s are per channel of each.

    Raises:
        TypeError: a `focus` that is no number.
        ValueError: a `focus` below 1.

    Cost: about 15 operations an entry. Features are float32 (float64 for float64 inputs), under autocast too: cubes
    leave the range of float16.
    """

    power = 1

    def __init__(self, head_dim: int, *, focus: float = 3.0, num_kv_heads: int = 1) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share="head")
        if not isinstance(focus, int | float) or isinstance(focus, bool):
            raise TypeError(f"focus must be a number, got {focus!r}")
        if not 1 <= focus < float("inf"):
            raise ValueError(f"focus must be at least 1 and finite, got {focus}; 3 is the paper's")
        self.focus = float(focus)
        self.feature_dim = head_dim
        self.scale = ChannelScale(num_kv_heads, head_dim)

    def map(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) -> the same, float32 or float64; the heads of a token all together."""
        self.check_input(x)
        with without_autocast(x.device.type):
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            return _focused(self.scale(x.relu() + _RELU_EPSILON), self.focus).flatten(1, 2)

    def extra_repr(self) -> str:
        """Sizes and the power of focusing."""
        return f"{super().extra_repr()}, focus={self.focus:g}"


def _focused(y: Tensor, focus: float) -> Tensor:
    """|y| y^p / |y^p| with norms over key/value heads and channels: (batch, num_kv_heads, group, length, head_dim).

    By way of y / max(y), for powers and squares of y itself leave the range of float32. The maximum cancels, and so
    does its gradient.
    """
    peak = y.detach().amax((1, 4), keepdim=True)
    relative = y / peak
    powers = relative**focus
    return powers * (peak * _norm(relative) / _norm(powers))


def _norm(x: Tensor) -> Tensor:
    return x.square().sum((1, 4), keepdim=True).sqrt()
