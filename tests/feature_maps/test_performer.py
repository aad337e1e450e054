"""FAVOR+ features: what is unbiased, what varies less, what stays in range, and who draws when."""

import math

import pytest
import torch
from torch import Tensor

from polysketch.feature_maps import PerformerFeatures

HEAD_DIM, BLOCKS = 4, 20_000
AXIS = torch.tensor([1.0, 0.0, 0.0, 0.0]).double()
DIAGONAL = torch.tensor([0.5, -0.5, 0.5, 0.5]).double()
PAIRS = [
    (0.9 * AXIS, 0.9 * AXIS),
    (0.9 * AXIS, 0.9 * DIAGONAL),
    (0.9 * DIAGONAL, -0.5 * AXIS),
    (1.4 * DIAGONAL, 0 * AXIS),
]


def estimates(query: Tensor, key: Tensor, *, seed: int, kind: str = "softmax", orthogonal: bool = True) -> Tensor:
    """(BLOCKS,) independent estimates of the kernel, each by one block of HEAD_DIM features, the constants undone."""
    feature_map = PerformerFeatures(
        HEAD_DIM, num_features=BLOCKS * HEAD_DIM, kind=kind, orthogonal=orthogonal, seed=seed
    ).double()
    products = feature_map.map_queries(query.expand(1, 1, 1, -1)) * feature_map.map_keys(key.expand(1, 1, 1, -1))
    if kind == "softmax":
        query, key = query * HEAD_DIM**-0.25, key * HEAD_DIM**-0.25
        largest = (feature_map.weight @ query).max() - query.square().sum() / 2
        products = products * (largest + feature_map.key_constant).exp()
    return products.flatten().unflatten(0, (BLOCKS, HEAD_DIM)).sum(1) * BLOCKS


def relu_kernel(query: Tensor, key: Tensor) -> Tensor:
    """E (relu(w . q') + e)(relu(w . k') + e) for Gaussian w: the arc-cosine kernel of degree 1, and what e adds."""
    query, key, epsilon = query * HEAD_DIM**-0.25, key * HEAD_DIM**-0.25, 1e-3
    norms = query.norm() * key.norm()
    angle = (query @ key / norms).clamp(-1, 1).acos()
    kernel = norms * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)
    return kernel + epsilon * (query.norm() + key.norm()) / math.sqrt(2 * math.pi) + epsilon**2


def vectors(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize(("query", "key"), PAIRS)
def test_the_product_of_features_is_unbiased_for_exp(query: Tensor, key: Tensor, orthogonal: bool, seed: int):
    found, expected = estimates(query, key, seed=seed, orthogonal=orthogonal), (query @ key / HEAD_DIM**0.5).exp()
    standard_error = found.std() / BLOCKS**0.5
    assert standard_error < 0.02 * expected
    assert abs(found.mean() - expected) < 3 * standard_error


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize(("query", "key"), PAIRS[:2])
def test_the_product_of_relu_features_is_unbiased_for_the_arc_cosine_kernel(
    query: Tensor, key: Tensor, orthogonal: bool
):
    found, expected = estimates(query, key, seed=0, kind="relu", orthogonal=orthogonal), relu_kernel(query, key)
    standard_error = found.std() / BLOCKS**0.5
    assert standard_error < 0.02 * expected
    assert abs(found.mean() - expected) < 3 * standard_error


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("query", "key"), PAIRS[:2] + PAIRS[3:])
def test_orthogonal_rows_vary_less_than_independent_ones(query: Tensor, key: Tensor, seed: int):
    query, key = 0.6 * query, 0.6 * key  # tails light enough for variances to be measured
    orthogonal, independent = (estimates(query, key, seed=seed, orthogonal=kind).var() for kind in (True, False))
    # of one Gaussian row: E exp(2 w . z) - (E exp(w . z))^2 with z = q' + k'
    exact = (query @ key).exp() * ((query + key).square().sum() / HEAD_DIM**0.5).expm1() / HEAD_DIM
    torch.testing.assert_close(independent, exact, rtol=0.1, atol=0)
    assert orthogonal < 0.98 * exact


@pytest.mark.parametrize("num_features", [6, 12, 20, 3])
def test_rows_are_orthogonal_in_blocks_of_the_head_dim(num_features: int):
    weight = PerformerFeatures(6, num_features=num_features, seed=0).weight.double()
    for block in weight.split(6):
        products = block @ block.T
        torch.testing.assert_close(products, products.diag().diag(), rtol=0, atol=1e-5)
    assert weight.shape == (num_features, 6)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_every_row_is_gaussian(orthogonal: bool):
    weight = PerformerFeatures(6, num_features=60_000, orthogonal=orthogonal, seed=0).weight.double()
    assert weight.mean(0).abs().max() < 0.02
    torch.testing.assert_close(weight.T @ weight / 60_000, torch.eye(6).double(), rtol=0, atol=0.03)
    squares = weight.square().sum(-1)  # chi squared with six degrees of freedom
    assert abs(squares.mean() - 6) < 0.06
    assert abs(squares.var() - 12) < 0.4


def test_the_directions_of_a_block_are_uniform():
    rows = PerformerFeatures(6, num_features=60_000, seed=0).weight.double().unflatten(0, (-1, 6))
    assert rows.mean(0).abs().max() < 0.05  # of each row of a block, not of all: signs of R left to Q would show
    assert (rows > 0).double().mean(0).sub(0.5).abs().max() < 0.03


@pytest.mark.parametrize("kind", ["softmax", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 3e4])
def test_features_are_positive_and_finite_at_any_norm(kind: str, dtype: torch.dtype, scale: float):
    feature_map = PerformerFeatures(64, kind=kind, seed=0)
    x = (scale * vectors(2, 2, 9, 64).clamp(-2, 2)).to(dtype).requires_grad_()
    for features in (feature_map.map_queries(x), feature_map.map_keys(x)):
        assert features.dtype == torch.float32
        assert features.min() > 0
        assert features.sum() < 1e30  # so that sums over keys stay in range
        (grad,) = torch.autograd.grad(features.sum(), x, retain_graph=True)
        assert grad.isfinite().all()


@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_the_worst_key_for_a_row_stays_in_range(head_dim: int):
    feature_map = PerformerFeatures(head_dim, seed=0)
    assert 1 < feature_map.key_constant <= 60
    longest = feature_map.weight[feature_map.weight.norm(dim=-1).argmax()]
    features = feature_map.map_keys((longest * head_dim**0.25).expand(1, 1, 1, -1))
    assert math.exp(39) < features.max() * 256**0.5 < math.exp(41)


def test_a_keys_features_depend_on_it_alone_whatever_the_scale():
    feature_map, x = PerformerFeatures(8, num_features=20, seed=0).double(), vectors(1, 2, 9, 8)
    louder = torch.cat([x[:, :, :4], 10 * x[:, :, 4:]], 2)
    assert torch.equal(feature_map.map_keys(louder)[:, :, :4], feature_map.map_keys(x)[:, :, :4])


@pytest.mark.parametrize("head_dim", [8, 128])
def test_the_key_constant_cancels_to_the_last_key(head_dim: int):
    feature_map, x = PerformerFeatures(head_dim, seed=0).double(), vectors(1, 1, 5, head_dim)
    assert (feature_map.key_constant > 1) == (head_dim == 128)
    scaled = x * head_dim**-0.25
    exponent = scaled @ feature_map.weight.T - scaled.square().sum(-1, keepdim=True) / 2
    expected = (exponent.exp() + 1e-6) / 16
    torch.testing.assert_close(feature_map.map_keys(x) * feature_map.key_constant.exp(), expected)


@pytest.mark.parametrize("kind", ["softmax", "relu"])
def test_gradients_are_those_of_the_features(kind: str):
    feature_map, x = PerformerFeatures(3, num_features=5, kind=kind, seed=0).double(), vectors(1, 1, 2, 3)
    assert torch.autograd.gradcheck(feature_map.map_queries, x.requires_grad_())
    assert torch.autograd.gradcheck(feature_map.map_keys, x)


def test_features_are_float32_under_autocast():
    feature_map, x = PerformerFeatures(8, seed=0), vectors(1, 2, 5, 8, dtype=torch.float32)
    expected = feature_map.map_keys(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(feature_map.map_keys(x), expected)


def test_a_seed_gives_the_function_and_each_redraw_another():
    first, second, x = PerformerFeatures(8, seed=3), PerformerFeatures(8, seed=3), vectors(1, 1, 5, 8)
    drawn = []
    for _ in range(3):
        drawn.append(first.map_keys(x))
        assert torch.equal(second.map_keys(x), drawn[-1])
        first.resample()
        second.resample()
    assert all(not torch.allclose(drawn[i], drawn[j], rtol=0.1) for i in range(3) for j in range(i))
    assert not torch.allclose(PerformerFeatures(8, seed=4).map_keys(x), drawn[0], rtol=0.1)


def test_a_reloaded_map_is_the_same_and_is_redrawn_alike():
    feature_map, other = PerformerFeatures(128, seed=3), PerformerFeatures(128, seed=4)
    feature_map.resample()
    assert other.key_constant != feature_map.key_constant
    other.load_state_dict(feature_map.state_dict())
    assert other.key_constant == feature_map.key_constant
    feature_map.resample()
    other.resample()
    assert torch.equal(other.weight, feature_map.weight)
    assert torch.equal(other.key_constant, feature_map.key_constant)


def test_a_redraw_moves_the_key_constant_with_the_rows():
    feature_map = PerformerFeatures(128, seed=0)
    for seed in range(3):
        feature_map.resample(torch.Generator().manual_seed(seed))
        expected = feature_map.weight.square().sum(-1).max() / 2 - 40
        torch.testing.assert_close(feature_map.key_constant, expected)


def test_the_default_generator_is_used_at_construction_alone_and_with_a_seed_never():
    torch.manual_seed(0)
    start = torch.get_rng_state()
    feature_map, x = PerformerFeatures(8, seed=3), vectors(1, 1, 5, 8)
    feature_map.resample()
    feature_map.resample(torch.Generator().manual_seed(1))
    feature_map.map_both(x, x)
    assert torch.equal(torch.get_rng_state(), start)
    without_seed = PerformerFeatures(8)
    assert not torch.equal(torch.get_rng_state(), start)
    torch.manual_seed(0)
    assert torch.equal(PerformerFeatures(8).weight, without_seed.weight)
    assert not torch.equal(PerformerFeatures(8).weight, without_seed.weight)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "elu"}, ValueError, "unknown kind 'elu'; known kinds: softmax, relu"),
        ({"num_features": 0}, ValueError, "num_features must be at least 1, got 0"),
        ({"seed": 1.5}, TypeError, "seed must be an integer or None, got 1.5"),
        ({"seed": True}, TypeError, "seed must be an integer or None, got True"),
        ({"seed": -1}, ValueError, "seed must be from 0 to [0-9]*, got -1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        PerformerFeatures(8, **options)
