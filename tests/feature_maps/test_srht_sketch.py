"""The sketch of sampled Hadamard transforms: unbiased, of a known variance, and what padding does to it."""

import pytest
import torch
from torch import Tensor

from polysketch.feature_maps import GaussianSketch, SRHTSketch

HEAD_DIM, DRAWS = 6, 3000


def products(degree: int, sketch_size: int, query: Tensor, key: Tensor, draws: int = DRAWS) -> Tensor:
    """phi(q) . phi(k) for many independent sketches at once: one for each of many heads."""
    torch.manual_seed(0)
    width = query.shape[0]
    sketch = SRHTSketch(width, degree=degree, sketch_size=sketch_size, num_kv_heads=draws, share="head").double()
    features = sketch.map_queries(torch.stack([query, key]).expand(1, draws, 2, width))
    return (features[0, :, 0] * features[0, :, 1]).sum(-1)


def pair(cosine: float, width: int = HEAD_DIM) -> tuple[Tensor, Tensor]:
    """Two unit vectors with this cosine, spread over all coordinates."""
    generator = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(width, 2, generator=generator, dtype=torch.float64)).Q
    return basis[:, 0], cosine * basis[:, 0] + (1 - cosine**2) ** 0.5 * basis[:, 1]


def variance(query: Tensor, key: Tensor) -> Tensor:
    """r times the variance of phi(q) . phi(k) at degree 4.

    (q D H)_c (k D H)_c has the second moment |q|^2 |k|^2 + 2 <q, k>^2 - 2 sum q_i^2 k_i^2 over random signs; given
    the signs, the mean over columns is exact, so that only the sampling of columns is left, which r divides.
    """
    second = query.square().sum() * key.square().sum() + 2 * (query @ key) ** 2 - 2 * (query * key).square().sum()
    return second**2 - (query @ key) ** 4


@pytest.mark.parametrize(
    ("degree", "sketch_size", "draws", "error"), [(4, 16, 3000, 0.02), (8, 32, 2000, 0.05), (16, 64, 400, 0.15)]
)
def test_the_product_of_features_is_unbiased_for_half_the_degree(
    degree: int, sketch_size: int, draws: int, error: float
):
    found = products(degree, sketch_size, *pair(0.9), draws)
    standard_error = found.std() / draws**0.5
    assert standard_error < error
    assert abs(found.mean() - 0.9 ** (degree / 2)) < 4 * standard_error


@pytest.mark.parametrize("sketch_size", [8, 32, 128])
def test_the_error_is_known_and_falls_as_one_over_the_root_of_the_sketch_size(sketch_size: int):
    query, key = pair(0.7)
    found = products(4, sketch_size, query, key).var()
    torch.testing.assert_close(found * sketch_size, variance(query, key), rtol=0.12, atol=0)


def test_the_error_is_smaller_than_with_gaussian_matrices():
    query, key = pair(0.7)
    gaussian = (1 + 2 * 0.7**2) ** 2 - 0.7**4
    assert products(4, 32, query, key).var() * 32 < 0.8 * gaussian


def test_the_squared_weight_is_biased_up_by_the_variance():
    query, key = pair(0.9)
    weights, exact = products(4, 16, query, key).square(), 0.9**4
    expected = exact + variance(query, key) / 16
    assert abs(weights.mean() - expected) < 5 * weights.std() / DRAWS**0.5
    assert weights.mean() > 1.1 * exact


@pytest.mark.parametrize("degree", [4, 8, 16])
@pytest.mark.parametrize("share", ["layer", "head"])
def test_the_features_follow_the_definition_with_matrices(degree: int, share: str):
    torch.manual_seed(0)
    sketch = SRHTSketch(HEAD_DIM, degree=degree, sketch_size=5, num_kv_heads=2, share=share).double()
    x = torch.randn(1, 2, 3, HEAD_DIM, dtype=torch.float64)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(3):  # of width 8, to which 6 and 5 are padded
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)

    def projection(head: int, level: int, node: int, width: int) -> Tensor:
        index = head if share == "head" else 0
        signs, columns = sketch.signs(level)[index, node], sketch.columns(level)[index, node]
        return (signs[:, None] * hadamard)[:width, columns]

    def tensor_srht(head: int, level: int, node: int) -> Tensor:
        if level < 0:
            return x[0, head]
        values = [tensor_srht(head, level - 1, 2 * node + i) for i in (0, 1)]
        left, right = (v @ projection(head, level, 2 * node + i, v.shape[-1]) for i, v in enumerate(values))
        return 5**-0.5 * left * right

    expected = torch.stack([tensor_srht(head, sketch.num_levels - 1, 0) for head in (0, 1)])
    torch.testing.assert_close(sketch.map_queries(x)[0], expected)


@pytest.mark.parametrize("width", [5, 6, 8])
def test_zeros_appended_up_to_the_power_of_two_change_nothing(width: int):
    torch.manual_seed(0)
    narrow, wide = SRHTSketch(width, sketch_size=7).double(), SRHTSketch(8, sketch_size=7).double()
    wide.load_state_dict(narrow.state_dict())
    x = torch.randn(2, 3, 4, width, dtype=torch.float64)
    padded = torch.cat([x, x.new_zeros(2, 3, 4, 8 - width)], -1)
    torch.testing.assert_close(narrow.map_queries(x), wide.map_queries(padded))


def test_at_degree_two_the_features_are_the_vector_itself():
    x = torch.randn(2, 3, 4, HEAD_DIM)
    sketch = SRHTSketch(HEAD_DIM, degree=2, sketch_size=99)
    assert torch.equal(sketch.map_queries(x), x)
    assert sketch.feature_dim == HEAD_DIM
    assert list(sketch.buffers()) == []


@pytest.mark.parametrize("generator", [None, 7])
def test_signs_are_fair_and_columns_are_drawn_with_replacement_from_all(generator: int | None):
    torch.manual_seed(0)
    sketch = SRHTSketch(60, degree=8, sketch_size=500, num_kv_heads=8, share="head")
    sketch.resample(None if generator is None else torch.Generator().manual_seed(generator))
    for level, width in ((0, 64), (1, 512)):
        signs, columns = sketch.signs(level), sketch.columns(level)
        assert signs.unique().tolist() == [-1.0, 1.0]
        assert abs(signs.mean()) < 4 / signs.numel() ** 0.5
        assert (int(columns.min()), int(columns.max())) == (0, width - 1)
        counts = torch.bincount(columns.flatten(), minlength=width)
        assert counts.min() > 0
        assert columns[0, 0].unique().numel() < 500
        assert all(not torch.equal(columns[0, 0], other) for other in columns[0, 1:])
        assert all(not torch.equal(signs[0, 0], other) for other in signs[0, 1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_signs_and_columns_survive_a_cast_unchanged(dtype: torch.dtype):
    sketch = SRHTSketch(HEAD_DIM)
    signs, columns = sketch.signs(0).clone(), sketch.columns(0).clone()
    sketch.to(dtype)
    assert torch.equal(sketch.signs(0).float(), signs)
    assert torch.equal(sketch.columns(0), columns)


def test_it_is_built_like_the_gaussian_sketch():
    for degree, share in ((2, "layer"), (4, "layer"), (8, "head")):
        options = {"degree": degree, "sketch_size": 5, "num_kv_heads": 2, "share": share}
        pair_of_maps = [kind(HEAD_DIM, **options) for kind in (GaussianSketch, SRHTSketch)]
        assert len({(each.feature_dim, each.power, each.num_maps, each.num_levels) for each in pair_of_maps}) == 1
