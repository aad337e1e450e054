"""The learned sketch: its formula, its gradients, its parameters, and the memory of its pieces."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from polysketch.feature_maps import LearnedSketch
from polysketch.ops import learned_sketch as sketch_networks
from polysketch.ops.learned_sketch.reference import learned_sketch
from polysketch.ops.native import why_unavailable


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch):
    """Seven rows at a time, of which three are summed at once: pieces that end inside sequences and heads."""
    monkeypatch.setitem(sketch_networks.chunked._PIECE_ROWS, "cpu", 7)
    monkeypatch.setattr(sketch_networks.chunked, "_SUMMED_ROWS", 3)


def build(
    degree: int = 4, share: str = "layer", sketch_size: int = 5, head_dim: int = 6, expansion: int = 8
) -> LearnedSketch:
    torch.manual_seed(0)
    sizes = {"degree": degree, "sketch_size": sketch_size, "num_kv_heads": 2, "expansion": expansion}
    sketch = LearnedSketch(head_dim, **sizes, share=share).double()
    for parameter in sketch.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return sketch


@pytest.mark.parametrize(
    ("degree", "share", "expansion"),
    [(4, "layer", 8), (4, "head", 1), (8, "layer", 3), (8, "head", 8), (16, "layer", 8), (16, "head", 13)],
)
@pytest.mark.usefixtures("small_pieces")
def test_features_and_gradients_are_those_of_the_formula(degree: int, share: str, expansion: int):
    sketch = build(degree, share, expansion=expansion)
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    of_networks = [weight for network in sketch.networks for weight in network.weights()]
    expected = sketch_networks.learned_sketch(x, of_networks, degree // 2, backend="reference")
    found = sketch.map_queries(x)
    torch.testing.assert_close(found, expected)
    tensors = [x, *sketch.parameters()]
    expected_grads = torch.autograd.grad((expected * weights).sum(), tensors)
    found_grads = torch.autograd.grad((found * weights).sum(), tensors)
    for one, other in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(one, other)


def test_the_definition_multiplies_two_networks_and_bounds_them_at_degree_4():
    """Algorithm 2 by hand, with modules of PyTorch's."""
    one, other = build().networks
    x, size = torch.randn(2, 3, 5, 6, dtype=torch.float64), 5

    def network(f: torch.nn.Module) -> Tensor:
        hidden = torch.nn.GELU(approximate="tanh")(f.input_up(f.input_norm(x)))
        return f.middle_down(torch.nn.GELU(approximate="tanh")(f.middle_up(f.middle_norm(f.input_down(hidden)))))

    expected = size**0.5 * torch.tanh(size**-0.5 * network(one) * network(other))
    torch.testing.assert_close(learned_sketch(x, [*one.weights(), *other.weights()], 2), expected)


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.parametrize(("leaves", "maps", "expansion"), [(2, 1, 8), (2, 2, 8), (4, 1, 8), (2, 1, 1), (4, 2, 13)])
def test_the_native_backend_is_the_definition_with_its_gradients(leaves: int, maps: int, expansion: int):
    sketch = build(2 * leaves, "head" if maps == 2 else "layer", expansion=expansion).float()
    weights = [weight for network in sketch.networks for weight in network.weights()]
    x = torch.randn(3, 4, 45, 6, requires_grad=True)
    results = []
    for backend in ("native", "reference"):
        output = sketch_networks.learned_sketch(x, weights, leaves, backend=backend)
        results.append([output, *torch.autograd.grad(output.sin().sum(), [x, *weights])])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() < 1e-4 * expected.norm()  # measured: 1e-6


@pytest.mark.usefixtures("small_pieces")
def test_gradcheck():
    sketch = build()
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    weights = [weight for one in sketch.networks for weight in one.weights()]
    assert torch.autograd.gradcheck(
        lambda x, *weights: sketch_networks.learned_sketch(x, list(weights), 2), (x, *weights), fast_mode=True
    )


@pytest.mark.parametrize("backend", ["chunked", "native"])
def test_the_operator_passes_opcheck(backend):
    if backend == "native" and why_unavailable():
        pytest.skip(str(why_unavailable()))
    dtype = torch.float32 if backend == "native" else torch.float64
    x = torch.randn(1, 2, 5, 6, dtype=dtype, requires_grad=True)
    weights = [weight.detach().to(dtype).requires_grad_() for one in build().networks for weight in one.weights()]
    torch.library.opcheck(torch.ops.polysketch.learned_sketch.default, (x, weights, 2, backend))


@pytest.mark.parametrize("degree", [4, 8])
def test_no_feature_exceeds_the_root_of_the_sketch_size(degree: int):
    sketch = build(degree)
    for parameter in sketch.parameters():
        parameter.data.mul_(5)
    largest = sketch.map_queries(torch.randn(1, 2, 200, 6, dtype=torch.float64)).abs().max()
    assert 0.99 * 5**0.5 < largest <= 5**0.5


@pytest.mark.parametrize(("head_dim", "sketch_size"), [(64, 32), (64, 64), (128, 16)])
def test_degree_four_has_the_parameters_of_the_paper(head_dim: int, sketch_size: int):
    sketch = LearnedSketch(head_dim, sketch_size=sketch_size)
    linears = 2 * (8 * head_dim * sketch_size + 24 * sketch_size**2)
    norms = 2 * (2 * head_dim + 2 * sketch_size)
    assert sum(parameter.numel() for parameter in sketch.parameters()) == linears + norms
    assert sum(parameter.numel() for parameter in sketch.parameters() if parameter.dim() == 2) == linears


@pytest.mark.parametrize("expansion", [1, 4, 8])
def test_parameters_and_operations_are_in_proportion_to_the_expansion(expansion: int):
    sketch, x = build(expansion=expansion), torch.randn(2, 2, 7, 6, dtype=torch.float64)
    products = expansion * (2 * 6 * 5 + 6 * 5**2)
    assert sum(parameter.numel() for parameter in sketch.parameters() if parameter.dim() == 2) == products
    with FlopCounterMode(display=False) as counted:
        sketch.map(x)
    assert counted.get_total_flops() == 2 * products * (2 * 2 * 7)


def test_an_expansion_is_a_positive_integer():
    with pytest.raises(ValueError, match="expansion must be"):
        LearnedSketch(8, expansion=0)
    with pytest.raises(TypeError, match="expansion must be"):
        LearnedSketch(8, expansion=2.0)


@pytest.mark.parametrize("degree", [4, 8, 16])
def test_there_are_degree_minus_two_networks_and_per_head_as_many_for_each(degree: int):
    assert len(LearnedSketch(8, degree=degree, num_kv_heads=3).networks) == degree - 2
    assert len(LearnedSketch(8, degree=degree, num_kv_heads=3, share="head").networks) == 3 * (degree - 2)


def test_linears_start_as_truncated_normals_of_variance_one_over_fan_in():
    torch.manual_seed(0)
    sketch = LearnedSketch(64, sketch_size=32)
    for one in sketch.networks:
        for linear in (one.input_up, one.input_down, one.middle_up, one.middle_down):
            scaled = linear.weight * linear.in_features**0.5
            assert abs(scaled.std() - 1) < 0.03
            assert scaled.abs().max() < 2.3


def test_half_precision_under_autocast_stays_close_and_gradients_stay_float32():
    torch.manual_seed(0)
    sketch = LearnedSketch(16, sketch_size=8)
    x = torch.randn(1, 2, 50, 16, requires_grad=True)
    exact = sketch.map_queries(x)
    (exact_grad,) = torch.autograd.grad(exact.square().sum(), sketch.networks[0].input_up.weight)
    with torch.autocast("cpu", torch.bfloat16):
        features = sketch.map_queries(x)
    features.float().square().sum().backward()
    grad = sketch.networks[0].input_up.weight.grad
    assert features.dtype == torch.bfloat16
    assert grad.dtype == torch.float32
    assert (features.float() - exact).norm() < 0.03 * exact.norm()
    assert (grad - exact_grad).norm() < 0.05 * exact_grad.norm()


def test_hidden_activations_are_never_held_for_the_whole_sequence():
    sketch = LearnedSketch(16, sketch_size=8)
    x = torch.randn(1, 4, 4096, 16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda x: x):
        sketch.map_queries(x)
    assert max(saved) == x.numel()
    assert sum(saved) < 1.2 * x.numel()


def test_the_flop_counter_sees_every_product():
    sketch = LearnedSketch(16, sketch_size=8, num_kv_heads=2, share="head")
    x = torch.randn(3, 4, 10, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        features = sketch.map_queries(x)
        forward = counter.get_total_flops()
        features.sum().backward()
    assert forward == 3 * 4 * 10 * 2 * 2 * (8 * 16 * 8 + 24 * 8**2)
    assert counter.get_total_flops() == 4 * forward
