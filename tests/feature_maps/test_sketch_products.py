"""Products of two sketches of unit length: their formula, and the size of their weights."""

import torch

from polysketch.feature_maps import SketchProducts

HEAD_DIM, HEADS, KV_HEADS, SKETCH = 8, 4, 2, 5


def test_features_are_two_directions_whose_products_are_weights():
    torch.manual_seed(0)
    products = SketchProducts(HEAD_DIM, sketch_size=SKETCH, num_kv_heads=KV_HEADS).double()
    x = torch.randn(2, HEADS, 7, HEAD_DIM, dtype=torch.float64)
    found = products.map(x)
    for head in range(HEADS):
        for sketch in (slice(0, SKETCH), slice(SKETCH, None)):
            matrix = products.weight[head // (HEADS // KV_HEADS)][:, sketch]
            direction = x[:, head] @ matrix
            expected = direction / direction.norm(dim=-1, keepdim=True)
            torch.testing.assert_close(found[:, head, :, sketch], expected)
    written_out = torch.einsum("bhni,bhnj->bhnij", *found.chunk(2, -1)).flatten(-2)
    torch.testing.assert_close(products.weights(found, found), written_out @ written_out.mT)


def test_equal_vectors_weigh_one_and_unrelated_ones_as_one_over_the_sketch_size():
    torch.manual_seed(0)
    products, x = SketchProducts(64, sketch_size=24), torch.randn(1, 1, 1_000, 64)
    features = products.map(x)
    weights = products.weights(features, features)[0, 0]
    torch.testing.assert_close(weights.diagonal(), torch.ones(1_000))
    others = weights[~torch.eye(1_000, dtype=torch.bool)]
    assert 1 / 24 < others.square().mean().sqrt() < 1.6 / 24  # 1 / r, and more as r directions of 64 are not orthogonal
    assert 0.5 / 64 < others.mean() < 1.5 / 64  # both sketches see one cosine, whose mean square is 1 / head_dim
