"""Second-order Taylor features of the exponential, on small learned projections (BASED)."""

import torch
from torch import Tensor

from polysketch.feature_maps.base import FeatureMap
from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.feature_maps.packing import pack_square, packed_size
from polysketch.feature_maps.projection import HeadProjection
from polysketch.ops.arguments import check_at_least_one


class Taylor(FeatureMap):
    """Features whose products are the exponential's Taylor polynomial of degree two, exactly.

        phi(x) = [1, y, (y (x) y) / sqrt(2)],  y = x W / d^(1/4):   phi(q) . phi(k) = 1 + s + s^2 / 2,
        s = (q W_q) . (k W_k) / sqrt(d)

    BASED (Arora et al., arXiv 2402.18668). A weight is never below 1/2. The tensor square is packed: 153 features at
    d = 16 where published code has 273, with the same products. W_q and W_k, one of each for every key/value head,
    are learned; in BASED they are part of the model's query and key projections, which d = 16 makes narrow.

    Args:
        head_dim: width of one head.
        projected_dim: d, the width after projection.
        num_kv_heads: key and value heads.

    Raises:
        ValueError: a size below one.

    Cost: head_dim d + d^2 multiply-adds a token and head; 2 head_dim d parameters a head.
    """

    power = 1

    def __init__(self, head_dim: int, *, projected_dim: int = 16, num_kv_heads: int = 1) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share="head")
        check_at_least_one(projected_dim=projected_dim)
        self.projected_dim = projected_dim
        self.feature_dim = 1 + projected_dim + packed_size(projected_dim)
        self.query_projection = HeadProjection(self.num_maps, head_dim, projected_dim)
        self.key_projection = HeadProjection(self.num_maps, head_dim, projected_dim)
        for projection in (self.query_projection, self.key_projection):
            lecun_normal_(projection.weight, head_dim)

    def map_queries(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) -> (batch, heads, length, feature_dim)."""
        self.check_input(x)
        return _expand(self.query_projection(x))

    def map_keys(self, x: Tensor) -> Tensor:
        """(batch, num_kv_heads, length, head_dim) -> (batch, num_kv_heads, length, feature_dim)."""
        self.check_input(x)
        return _expand(self.key_projection(x))


def _expand(x: Tensor) -> Tensor:
    """[1, y, packed y (x) y / sqrt(2)], y = x / d^(1/4)."""
    # Squares leave the range of float16, and cancel in a product of features.
    y = x.to(torch.promote_types(x.dtype, torch.float32)) * x.shape[-1] ** -0.25
    return torch.cat([torch.ones_like(y[..., :1]), y, pack_square(y) * 0.5**0.5], -1)
