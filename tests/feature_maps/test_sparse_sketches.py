"""The largest entries of two sketches: their formula, and that they come and go at zero."""

import pytest
import torch

from polysketch.feature_maps import SparseSketches

HEAD_DIM, HEADS, KV_HEADS, SKETCH, KEPT = 8, 4, 2, 6, 3


def sketches_of() -> SparseSketches:
    torch.manual_seed(0)
    return SparseSketches(HEAD_DIM, sketch_size=SKETCH, kept=KEPT, num_kv_heads=KV_HEADS).double()


def test_features_are_the_largest_entries_less_the_next_of_unit_length():
    sketches, x = sketches_of(), torch.randn(2, HEADS, 7, HEAD_DIM, dtype=torch.float64)
    found = sketches.map(x)
    for head in range(HEADS):
        matrices = sketches.weight[head // (HEADS // KV_HEADS)].split(SKETCH, -1)
        for half, matrix in zip(found[:, head].split(SKETCH, -1), matrices, strict=True):
            for vector, entries in zip(half.flatten(0, 1), (x[:, head] @ matrix).flatten(0, 1), strict=True):
                next_size = entries.abs().sort(descending=True).values[KEPT]
                above = entries.sign() * (entries.abs() - next_size).clamp(min=0.0)
                assert int((vector != 0).sum()) == KEPT
                torch.testing.assert_close(vector, above / above.norm())


def test_cells_and_weights_are_the_entries_that_are_not_zero():
    sketches, x = sketches_of(), torch.randn(2, HEADS, 7, HEAD_DIM, dtype=torch.float64)
    cells, weights = sketches.sparse(x)
    assert cells.dtype == torch.int32
    assert cells.shape == weights.shape == (2, HEADS, 7, 2 * KEPT)
    found = sketches.map(x).unflatten(-1, (2, -1)).gather(-1, cells.long().unflatten(-1, (2, -1)))
    torch.testing.assert_close(found.flatten(-2), weights)
    assert cells.unflatten(-1, (2, -1)).sort(-1).values.diff(dim=-1).gt(0).all()  # no cell twice


def test_features_are_continuous_where_an_entry_comes_or_goes():
    """Between two vectors there are many changes of the kept entries, and small steps change features little."""
    sketches = sketches_of()
    generator = torch.Generator().manual_seed(1)
    start, end = torch.randn(2, HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
    path = torch.linspace(0, 1, 20_001, dtype=torch.float64)[:, None, None]
    found = sketches.map((start + path * (end - start)).transpose(0, 1)[None])[0]
    changes = (found != 0).long().diff(dim=1).abs().sum()
    assert changes > 20
    assert found.diff(dim=1).abs().max() < 0.01


def test_most_unrelated_vectors_weigh_nothing_and_equal_ones_one():
    torch.manual_seed(0)
    sketches, x = SparseSketches(64), torch.randn(1, 1, 1_000, 64)
    features = sketches.map(x)
    weights = sketches.weights(features, features)[0, 0]
    torch.testing.assert_close(weights.diagonal(), torch.ones(1_000))
    others = weights[~torch.eye(1_000, dtype=torch.bool)]
    assert (others.abs() < 1e-3).double().mean() > 0.5
    assert others.square().mean().sqrt() < 1.5 / 64


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"sketch_size": 257}, "sketch_size must be at most 256, got 257"),
        ({"sketch_size": 8, "kept": 8}, "kept must be less than sketch_size, got 8 and 8"),
        ({"kept": 0}, "kept must be at least 1"),
    ],
)
def test_sizes_out_of_range_are_refused(sizes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        SparseSketches(8, **sizes)
