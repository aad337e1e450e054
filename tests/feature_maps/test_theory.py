"""What PolySketchFormer and LLOPS prove of sketches, beyond the moments that each map's own tests hold."""

import pytest
import torch
from torch import Tensor

from polysketch.evaluation import polynomial_weights, sketch_error
from polysketch.feature_maps import GaussianSketch, LowRankSketch, RandomSketch, SRHTSketch

HEAD_DIM, TOKENS, DRAWS = 8, 12, 60
SKETCHES = [GaussianSketch, SRHTSketch]


def vectors(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def many(sketch: type[RandomSketch], degree: int, sketch_size: int, draws: int = DRAWS) -> RandomSketch:
    """Independent sketches, one for each of many heads."""
    torch.manual_seed(0)
    return sketch(HEAD_DIM, degree=degree, sketch_size=sketch_size, num_kv_heads=draws, share="head").double()


def epsilons(sketch: type[RandomSketch], degree: int, sketch_size: int) -> tuple[Tensor, Tensor]:
    """Theorem 1.1's epsilon of the squared products, and the same measure of the products themselves, of each draw."""
    query, key = vectors(TOKENS, HEAD_DIM), vectors(TOKENS, HEAD_DIM, seed=2)
    made = many(sketch, degree, sketch_size)
    maps = [made.map_queries(x.expand(1, DRAWS, TOKENS, HEAD_DIM))[0] for x in (query, key)]
    products = maps[0] @ maps[1].mT
    found = []
    for weights, power in ((products.square(), degree), (products, degree // 2)):
        exact = polynomial_weights(query, key, power).expand_as(weights)
        found.append(sketch_error(weights, exact, query, key, power))
    return found[0], found[1]


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("degree", [4, 8])
@pytest.mark.parametrize("sketch_size", [16, 64, 256])
def test_theorem_1_1_holds_with_a_constant_of_two(sketch: type[RandomSketch], degree: int, sketch_size: int):
    """r = Theta(p / eps^2) with probability 1 - delta: eps = 2 sqrt(p / r) fails in at most one draw of twenty."""
    epsilon = epsilons(sketch, degree, sketch_size)[0]
    assert (epsilon > 2 * (degree / sketch_size) ** 0.5).double().mean() <= 0.05


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("degree", [4, 8])
def test_the_products_error_falls_as_one_over_the_root_of_the_sketch_size(sketch: type[RandomSketch], degree: int):
    """Over all pairs at once, from 32 to 512 features by four; a root mean square over draws."""
    means = [epsilons(sketch, degree, size)[1].square().mean().sqrt() for size in (32, 512)]
    assert 3.2 < means[0] / means[1] < 5.0


@pytest.mark.parametrize("degree", [4, 8])
def test_the_squared_weights_error_falls_faster_while_its_bias_does(degree: int):
    """Bias is in 1 / r where the error is in 1 / sqrt(r): below h^2 features it weighs."""
    means = [epsilons(GaussianSketch, degree, size)[0].mean() for size in (4, 64)]
    assert means[0] / means[1] > 5.0


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_weights_are_never_negative_though_products_are(sketch: type[RandomSketch], degree: int):
    made, query, key = (
        many(sketch, degree, 6, 20),
        vectors(1, 20, TOKENS, HEAD_DIM),
        vectors(1, 20, 9, HEAD_DIM, seed=2),
    )
    products = made.map_queries(query) @ made.map_keys(key).mT
    assert (products**made.power >= 0).all()
    assert (products < 0).any()


@pytest.mark.parametrize(("degree", "expected"), [(4, 1.73), (8, 5.48)])
def test_at_a_cosine_of_four_fifths_16_features_overestimate_weights_by_this_factor(degree: int, expected: float):
    """By the moments of the recursion. X = E (phi.phi)^2 and M = E |phi|^2 |phi|^2 at degree 4 give those at 8."""
    cosine, size, draws = 0.8, 16, 20_000
    square, fourth = 1 + 2 * cosine**2, cosine**4
    products = fourth + (square**2 - fourth) / size
    if degree == 8:
        norms = 1 + (square**2 - 1) / size
        products = products**2 + ((norms + 2 * products) ** 2 - products**2) / size
    assert products / cosine**degree == pytest.approx(expected, abs=0.01)
    pair = torch.zeros(2, HEAD_DIM, dtype=torch.float64)
    pair[0, 0], pair[1, 0], pair[1, 1] = 1.0, cosine, 0.6
    features = many(GaussianSketch, degree, size, draws).map_queries(pair.expand(1, draws, 2, HEAD_DIM))[0]
    weights = (features[:, 0] * features[:, 1]).sum(-1).square()
    assert abs(weights.mean() - products) < 4 * weights.std() / draws**0.5
    assert 4 * weights.std() / draws**0.5 < 0.4 * products


def test_a_column_of_the_recursive_sketch_of_degree_four_is_no_product_of_projections():
    """LLOPS's factors of rank one hold PolySketchFormer's features of degree 2, but not the recursion's of degree 4.

    phi_i(x) = (x^T L_i x)(x^T R_i x) / sqrt(r): the matrix of each side would have rank one, and has that of the head.
    """
    torch.manual_seed(0)
    size, x = 20, vectors(1, 1, 5, HEAD_DIM)
    made = GaussianSketch(HEAD_DIM, degree=8, sketch_size=size).double()
    leaves, nodes = made.matrices(0)[0], made.matrices(1)[0]
    sides = [
        torch.einsum("ac,bc,ci->iab", leaves[2 * side], leaves[2 * side + 1], nodes[side]) * size**-0.5
        for side in (0, 1)
    ]
    forms = [torch.einsum("...a,iab,...b->...i", x, side, x) for side in sides]
    torch.testing.assert_close(made.map_queries(x), forms[0] * forms[1] * size**-0.5)
    assert all((torch.linalg.matrix_rank(side) == HEAD_DIM).all() for side in sides)
    first, second = LowRankSketch(HEAD_DIM, degree=4, num_features=size).double().query_factors[0, 0, :2]
    assert (torch.linalg.matrix_rank(torch.einsum("ai,bi->iab", first, second)) == 1).all()


@pytest.mark.parametrize("degree", [2, 3])
def test_as_many_low_rank_features_as_rank_one_terms_are_exact(degree: int):
    """<q, k>^p is a sum of head_dim^p products of entries: the factors that pick these entries give it exactly."""
    width = 3
    made = LowRankSketch(width, degree=degree, num_features=width**degree).double()
    entries = torch.cartesian_prod(*[torch.arange(width)] * degree)
    picked = torch.nn.functional.one_hot(entries.T, width).mT.double()
    for factors in (made.query_factors, made.key_factors):
        factors.data[0, 0] = picked
    query, key = vectors(1, 1, 6, width), vectors(1, 1, 7, width, seed=2)
    found = made.map_queries(query) @ made.map_keys(key).mT
    torch.testing.assert_close(found, polynomial_weights(query, key, degree))


@pytest.mark.parametrize(("size", "expected"), [(16, 91.9), (32, 46.5)])
def test_weights_of_unrelated_vectors_are_overestimated_by_nearly_the_square_of_the_head_size(size, expected):
    """Of layer-normed vectors, of width 64, at degree 4: E w~ / E w = 1 + h^2 / (3 r) and terms of lower order.

    Entries of layer-normed vectors sum to zero: they are uniform on a sphere in h - 1 dimensions. s = <q, k> has
    E s^2 = h^2 / (h - 1) and E s^4 = 3 h^4 / ((h - 1)(h + 1)); given s, E w~ = s^4 + ((h^2 + 2 s^2)^2 - s^4) / r.
    """
    width, draws, tokens = 64, 400, 64
    second, fourth = width**2 / (width - 1), 3 * width**4 / ((width - 1) * (width + 1))
    ratio = 1 + (width**4 + 4 * width**2 * second + 3 * fourth) / (size * fourth)
    assert ratio == pytest.approx(expected, abs=0.1)
    assert ratio == pytest.approx(1 + width**2 / (3 * size), rel=0.08)
    torch.manual_seed(0)
    made = GaussianSketch(width, degree=4, sketch_size=size, num_kv_heads=draws, share="head").double()
    query, key = (torch.nn.functional.layer_norm(vectors(1, draws, tokens, width, seed=s), (width,)) for s in (1, 2))
    weights = (made.map_queries(query) @ made.map_keys(key).mT).square()
    assert weights.mean() / (query @ key.mT).pow(4).mean() == pytest.approx(ratio, rel=0.05)
