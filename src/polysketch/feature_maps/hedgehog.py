"""Learned softmax features (Hedgehog)."""

import torch
from torch import Tensor

from polysketch.feature_maps.base import FeatureMap
from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.feature_maps.projection import HeadProjection
from polysketch.ops.arguments import check_at_least_one


class Hedgehog(FeatureMap):
    """phi(x) = [softmax(x W), softmax(-x W)]: non-negative features that sum to two.

    Hedgehog (Zhang et al., arXiv 2402.04347). One W for queries and one for keys, for every key/value head, without a
    bias, started at the identity. Columns beyond head_dim, in a wider map, start as random directions of unit length
    on average: equal ones would stay equal for ever. Published codes differ among themselves (one softmax over both
    signs, one W for all heads, a bias, a floor of 1e-12): here the formula holds as it stands.

    Args:
        head_dim: width of one head.
        num_features: even, 2 head_dim or more; 2 head_dim when None.
        num_kv_heads: key and value heads.

    Raises:
        ValueError: an odd number of features, or fewer than 2 head_dim.

    Cost: head_dim num_features / 2 multiply-adds and num_features exponentials a token and head; head_dim num_features
    parameters a head.
    """

    power = 1

    def __init__(self, head_dim: int, *, num_features: int | None = None, num_kv_heads: int = 1) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads, share="head")
        num_features = 2 * head_dim if num_features is None else num_features
        check_at_least_one(num_features=num_features)
        if num_features % 2 or num_features < 2 * head_dim:
            raise ValueError(
                f"num_features must be even and at least 2 * head_dim = {2 * head_dim}, got {num_features}"
            )
        self.feature_dim = num_features
        self.query_projection = HeadProjection(self.num_maps, head_dim, num_features // 2)
        self.key_projection = HeadProjection(self.num_maps, head_dim, num_features // 2)
        for projection in (self.query_projection, self.key_projection):
            _start_at_identity(projection.weight)

    def map_queries(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim) -> (batch, heads, length, feature_dim)."""
        self.check_input(x)
        return _both_signs(self.query_projection(x))

    def map_keys(self, x: Tensor) -> Tensor:
        """(batch, num_kv_heads, length, head_dim) -> (batch, num_kv_heads, length, feature_dim)."""
        self.check_input(x)
        return _both_signs(self.key_projection(x))


def _both_signs(x: Tensor) -> Tensor:
    x = x.float() if x.dtype == torch.float16 else x  # exponentials leave the range of float16
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)


@torch.no_grad()
def _start_at_identity(weight: Tensor) -> None:
    """(maps, inputs, outputs): the identity, and random columns beyond it."""
    inputs = weight.shape[1]
    weight[..., :inputs] = torch.eye(inputs)
    if weight.shape[2] > inputs:
        lecun_normal_(weight[..., inputs:], inputs)
