"""The random sketch: what Theorem 1.1 and the moments of Gaussian products promise."""

import pytest
import torch
from torch import Tensor

from polysketch.feature_maps import GaussianSketch

HEAD_DIM, DRAWS = 6, 3000


def products(degree: int, sketch_size: int, query: Tensor, key: Tensor, draws: int = DRAWS) -> Tensor:
    """phi(q) . phi(k) for many independent sketches at once: one for each of many heads."""
    torch.manual_seed(0)
    sketch = GaussianSketch(HEAD_DIM, degree=degree, sketch_size=sketch_size, num_kv_heads=draws, share="head").double()
    both = torch.stack([query, key]).expand(1, draws, 2, HEAD_DIM)
    features = sketch.map_queries(both)
    return (features[0, :, 0] * features[0, :, 1]).sum(-1)


def pair(cosine: float) -> tuple[Tensor, Tensor]:
    """Two unit vectors with this cosine."""
    query, key = torch.zeros(2, HEAD_DIM, dtype=torch.float64)
    query[0], key[0], key[1] = 1.0, cosine, (1 - cosine**2) ** 0.5
    return query, key


@pytest.mark.parametrize(
    ("degree", "sketch_size", "draws", "error"), [(4, 16, 3000, 0.02), (8, 32, 2000, 0.05), (16, 64, 400, 0.15)]
)
def test_the_product_of_features_is_unbiased_for_half_the_degree(
    degree: int, sketch_size: int, draws: int, error: float
):
    query, key = pair(0.9)
    found = products(degree, sketch_size, query, key, draws)
    standard_error = found.std() / draws**0.5
    assert standard_error < error
    assert abs(found.mean() - 0.9 ** (degree / 2)) < 4 * standard_error


def test_the_error_falls_as_one_over_the_root_of_the_sketch_size():
    query, key = pair(0.7)
    deviations = torch.stack([products(4, size, query, key).std() for size in (8, 32, 128)])
    torch.testing.assert_close(deviations[:-1] / deviations[1:], torch.full((2,), 2.0).double(), rtol=0.15, atol=0)


def test_the_squared_weight_is_biased_up_by_the_variance():
    query, key = pair(0.9)
    found = products(4, 16, query, key)
    weights, exact = found.square(), 0.9**4
    torch.testing.assert_close(weights.mean(), found.mean() ** 2 + found.var(correction=0))
    # E w = s^4 + Var / r, and Var = (1 + 2 s^2)^2 - s^4 for unit vectors
    expected = exact + ((1 + 2 * 0.9**2) ** 2 - exact) / 16
    assert abs(weights.mean() - expected) < 5 * weights.std() / DRAWS**0.5
    assert weights.mean() > 1.5 * exact


def test_at_degree_two_the_features_are_the_vector_itself():
    x = torch.randn(2, 3, 4, HEAD_DIM)
    sketch = GaussianSketch(HEAD_DIM, degree=2, sketch_size=99)
    assert torch.equal(sketch.map_queries(x), x)
    assert sketch.feature_dim == HEAD_DIM
    assert list(sketch.buffers()) == []


@pytest.mark.parametrize("degree", [4, 8, 16])
def test_the_features_follow_the_recursion_of_algorithm_1(degree: int):
    torch.manual_seed(0)
    sketch = GaussianSketch(HEAD_DIM, degree=degree, sketch_size=5).double()
    x = torch.randn(1, 1, 3, HEAD_DIM, dtype=torch.float64)

    def algorithm_1(level: int, node: int) -> Tensor:
        if level < 0:
            return x[0, 0]
        left, right = (algorithm_1(level - 1, 2 * node + i) @ sketch.matrices(level)[0, 2 * node + i] for i in (0, 1))
        return 5**-0.5 * left * right

    torch.testing.assert_close(sketch.map_queries(x)[0, 0], algorithm_1(sketch.num_levels - 1, 0))


@pytest.mark.parametrize("degree", [4, 8, 16])
def test_there_are_degree_minus_two_independent_matrices(degree: int):
    torch.manual_seed(0)
    sketch = GaussianSketch(64, degree=degree, sketch_size=32)
    matrices = [matrix for level in range(sketch.num_levels) for matrix in sketch.matrices(level)[0]]
    assert len(matrices) == degree - 2
    assert list(sketch.parameters()) == []
    for index, matrix in enumerate(matrices):
        assert abs(matrix.std() - 1) < 0.08
        assert all(not torch.equal(matrix, other) for other in matrices[:index])
