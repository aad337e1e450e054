"""Two-layer networks as features, what LLOPS compares with in section 4.3."""

import torch
from torch import Tensor, nn

from polysketch.feature_maps.base import FeatureMap
from polysketch.feature_maps.initialization import lecun_normal_
from polysketch.ops.arguments import check_at_least_one


class TwoLayerNetwork(FeatureMap):
    """phi_Q(x) = B gelu(A x + a) + b, phi_K with weights of its own; products of features may have either sign.

    To be trained to approximate a kernel, as LLOPS does in section 4.3, which gives neither width nor nonlinearity:
    here a hidden layer as wide as there are features, and GELU in its tanh form. Weights start as truncated normals of
    variance 1 / fan_in, those of the last layer divided by num_features^(1/4) so that products start near one.

    Args:
        head_dim: width of one head.
        num_features: m.
        hidden_size: width of the hidden layer; `num_features` when None.
        num_kv_heads: accepted so that every map is built alike: heads share the networks.

    Raises:
        TypeError: a size that is no integer.
        ValueError: a size below one.

    Cost: hidden_size (head_dim + num_features) multiply-adds a token and head; twice as many parameters, and biases.
    """

    power = 1

    def __init__(
        self, head_dim: int, *, num_features: int = 256, hidden_size: int | None = None, num_kv_heads: int = 1
    ) -> None:
        super().__init__(head_dim, num_kv_heads=num_kv_heads)
        hidden_size = num_features if hidden_size is None else hidden_size
        check_at_least_one(num_features=num_features, hidden_size=hidden_size)
        self.feature_dim = num_features
        self.query_network = _network(head_dim, hidden_size, num_features)
        self.key_network = _network(head_dim, hidden_size, num_features)

    def map_queries(self, x: Tensor) -> Tensor:
        """phi_Q."""
        self.check_input(x)
        return self.query_network(x)

    def map_keys(self, x: Tensor) -> Tensor:
        """phi_K."""
        self.check_input(x)
        return self.key_network(x)


def _network(inputs: int, hidden_size: int, outputs: int) -> nn.Sequential:
    first, second = nn.Linear(inputs, hidden_size), nn.Linear(hidden_size, outputs)
    with torch.no_grad():
        for linear, scale in ((first, 1.0), (second, outputs**-0.25)):
            lecun_normal_(linear.weight, linear.in_features, scale=scale)
            linear.bias.zero_()
    return nn.Sequential(first, nn.GELU(approximate="tanh"), second)
