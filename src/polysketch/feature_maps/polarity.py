"""Polarity features (PolaFormer): the positive and the negative part of a vector, each to a learned power."""

import torch
from torch import Tensor, nn

from polysketch.feature_maps.base import FeatureMap
from polysketch.feature_maps.focused import ChannelScale
from polysketch.ops.autocast import without_autocast

_POWER_RANGE = 4.0


class PolarityFeatures(FeatureMap):
    """phi(x) = [relu(y)^p, relu(-y)^p], y = x / softplus(s), p = 1 + 4 sigmoid(w).

    PolaFormer (Meng, Luo, Li, Jiang and Zhang, "PolaFormer: Polarity-aware Linear Attention for Vision Transformers",
    ICLR 2025). s and w are learned for every channel of every key/value head, shared by queries and keys, and start at
    zero: p = 3. phi(q) . phi(k) is the same-sign part of the product; with one of them `opposed`, it is the
    opposite-sign part. At p = 1 the first less the second is y_q . y_k.

    Not taken over: learned position embeddings added to keys, which tie a layer to one length.

    Args:
        head_dim: width of one head; features are twice as wide.
        num_kv_heads: key and value heads.

    Cost: about 10 operations and two powers an entry. Features are float32 (float64 for float64 inputs), under autocast
    too; entries of some 5,000 in both q and k are the limit of a product in float32 at p = 5.
    """

    power = 1

    def __init__(self, head_dim: int, *, num_kv_heads: int = 1) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share="head")
        self.feature_dim = 2 * head_dim
        self.scale = ChannelScale(num_kv_heads, head_dim)
        self.exponent = nn.Parameter(torch.zeros(num_kv_heads, head_dim))

    def map(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) -> (batch, heads, length, 2 head_dim), non-negative, float32 or float64."""
        self.check_input(x)
        with without_autocast(x.device.type):
            y = self.scale(x.to(torch.promote_types(x.dtype, torch.float32)))
            power = 1 + _POWER_RANGE * self.exponent.to(y.dtype).sigmoid()[:, None, None]
            return torch.cat([y.relu() ** power, (-y).relu() ** power], -1).flatten(1, 2)

    def opposed(self, features: Tensor) -> Tensor:
        """The features of -x, given those of x: the two halves change places."""
        return features.roll(self.head_dim, -1)
