"""Products of two soft codes: their formula, and how much more a match weighs than another key."""

import torch

from polysketch.feature_maps import GaussianSketch, SoftCodes

HEAD_DIM, HEADS, KV_HEADS, CODEWORDS = 8, 4, 2, 5


def test_features_are_two_soft_codes_whose_products_are_weights():
    torch.manual_seed(0)
    codes = SoftCodes(HEAD_DIM, codewords=CODEWORDS, num_kv_heads=KV_HEADS).double()
    for parameter in codes.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, HEADS, 7, HEAD_DIM, dtype=torch.float64)
    biases = (codes.query_bias, codes.key_bias)
    for found, bias in zip(codes.map_both(x, x), biases, strict=True):
        bias, sharpness = bias.view(KV_HEADS, -1), codes.log_sharpness.exp().view(KV_HEADS, 2)
        for head in range(HEADS):
            own = head // (HEADS // KV_HEADS)
            unit = x[:, head] / (x[:, head].square().mean(-1, keepdim=True) + 1e-6).sqrt()
            logits = unit @ codes.weight[own] / HEAD_DIM**0.5 + bias[own]
            for code in (0, 1):
                words = slice(code * CODEWORDS, (code + 1) * CODEWORDS)
                expected = CODEWORDS**0.5 * torch.softmax(sharpness[own, code] * logits[..., words], -1)
                torch.testing.assert_close(found[:, head, :, words], expected)
    query, key = codes.map_both(x, x)
    products = [torch.einsum("bhni,bhnj->bhnij", *y.chunk(2, -1)).flatten(-2) for y in (query, key)]
    torch.testing.assert_close(codes.weights(query, key), products[0] @ products[1].mT)


def test_a_match_of_sharp_codes_weighs_as_much_as_hundreds_of_other_keys():
    """By a dense sketch with as many products it weighs as much as r: that is why far keys were lost."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 2_000, 64)
    codes, sketch = SoftCodes(64, codewords=24), GaussianSketch(64, sketch_size=32)
    codes.log_sharpness.data.fill_(5.0)
    ratios = {}
    for name, feature_map in (("codes", codes), ("sketch", sketch)):
        features = feature_map.map_keys(x)
        weights = feature_map.weights(features, features)[0, 0]
        others = weights.masked_fill(torch.eye(2_000, dtype=torch.bool), 0.0).sum(-1) / 1_999
        ratios[name] = (weights.diagonal().mean() / others.mean()).item()
    assert ratios["codes"] > 300
    assert ratios["sketch"] < 60


def test_codes_start_with_weights_near_one():
    """A far key then weighs about as much as exp(far_bias), whatever the sizes; uneven cells make it a little more."""
    torch.manual_seed(0)
    for head_dim, codewords in ((32, 8), (64, 24)):
        query, key = torch.randn(2, 1, 16, 500, head_dim).unbind()
        codes = SoftCodes(head_dim, codewords=codewords, num_kv_heads=16)
        assert 1.0 < codes.weights(*codes.map_both(query, key)).mean() < 1.5
