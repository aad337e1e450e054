"""Sketched powers: the expectation of each power, its error, and the weights of a squared polynomial of wide heads."""

import pytest
import torch

from polysketch import attention
from polysketch.evaluation import mechanism_weights
from polysketch.feature_maps import PowerSketches

HEAD_DIM, DRAWS, TOKENS = 8, 4_000, 3


def vectors(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / HEAD_DIM**0.5


def products(sketch_size: int, degree: int = 4) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(draws, queries, keys) for each power, and the inner products."""
    torch.manual_seed(0)
    made = PowerSketches(HEAD_DIM, degree=degree, sketch_size=sketch_size, num_kv_heads=DRAWS, share="head").double()
    query, key = vectors(TOKENS, HEAD_DIM, seed=1), vectors(TOKENS, HEAD_DIM, seed=2)
    shape = (1, DRAWS, TOKENS, HEAD_DIM)
    features = made.map_both(query.expand(shape), key.expand(shape))
    assert features[0].shape[-1] == made.feature_dim == 1 + HEAD_DIM + (degree - 1) * sketch_size
    found = [features[0][0, ..., part] @ features[1][0, ..., part].mT for part in made.slices]
    return found, query @ key.mT


@pytest.mark.parametrize("sketch_size", [1, 6])
def test_each_power_has_its_expectation(sketch_size: int):
    found, exact = products(sketch_size)
    for power, weights in enumerate(found):
        error = (weights.mean(0) - exact**power).abs()
        if power < 2:
            assert float(error.max()) < 1e-12
        else:
            assert bool((error < 4.5 * weights.std(0) / DRAWS**0.5).all())
            assert float(weights.std(0).min()) > 0


def test_the_error_of_each_power_falls_as_one_over_the_root_of_the_sketch_size():
    few, many = products(4)[0], products(64)[0]
    for power in (2, 3, 4):
        assert 3.0 < float(few[power].std(0).mean() / many[power].std(0).mean()) < 5.3


def test_a_squared_polynomial_of_wide_heads_is_approached_and_never_negative():
    """64 wide, degree 3: 47,905 packed products would be exact."""
    query, key = (torch.randn(1, 1, 40, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    options = {"num_heads": 1, "head_dim": 64, "coefficients": (1.0, -0.5, 0.02)}
    weights = {}
    for size in (None, 16, 1024):
        torch.manual_seed(3)
        made = attention.build("squared-polynomial", **options, linear=size is not None, sketch_size=size)
        weights[size] = mechanism_weights(made, query, key, causal=True)
    errors = [float((weights[size] - weights[None]).norm() / weights[None].norm()) for size in (16, 1024)]
    assert errors[1] < 0.5 * errors[0] < 0.7
    assert float(weights[16].min()) >= 0


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="sketch_size must be at least 1, got 0"):
        PowerSketches(8, sketch_size=0)
    with pytest.raises(ValueError, match="sketch_size=8 sketches the linear form: add linear=True"):
        attention.build("squared-polynomial", num_heads=1, head_dim=8, sketch_size=8)
