"""Two-layer networks: their formula, widths and start."""

import pytest
import torch

from polysketch.feature_maps import TwoLayerNetwork


def test_features_are_two_layers_with_weights_of_their_own_for_queries_and_keys():
    torch.manual_seed(0)
    made, x = TwoLayerNetwork(6, num_features=5, hidden_size=7), torch.randn(1, 2, 3, 6)
    for parameter in made.parameters():
        parameter.data.normal_()
    for one_map, network in ((made.map_queries, made.query_network), (made.map_keys, made.key_network)):
        first, _, second = network
        hidden = x @ first.weight.T + first.bias
        hidden = 0.5 * hidden * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
        torch.testing.assert_close(one_map(x), hidden @ second.weight.T + second.bias, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(made.map_queries(x), made.map_keys(x))


def test_the_hidden_layer_is_as_wide_as_the_features_unless_told_otherwise():
    assert TwoLayerNetwork(6, num_features=9).query_network[0].out_features == 9
    assert TwoLayerNetwork(6).feature_dim == 256
    with pytest.raises(ValueError, match="hidden_size must be at least 1, got 0"):
        TwoLayerNetwork(6, hidden_size=0)


def test_products_start_with_a_size_near_one():
    torch.manual_seed(0)
    made = TwoLayerNetwork(64)
    query, key = torch.randn(2, 1, 1, 200, 64)
    assert 0.1 < (made.map_queries(query) @ made.map_keys(key).mT).std() < 1.0
