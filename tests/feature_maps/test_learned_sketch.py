"""The learned sketch: its formula, its gradients, its parameters, and the memory of its pieces."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention.covering import pairs_always
from polysketch.feature_maps import LearnedSketch
from polysketch.ops import learned_sketch as sketch_networks
from polysketch.ops.learned_sketch import ACTIVATIONS
from polysketch.ops.learned_sketch.native import _ACTIVATIONS
from polysketch.ops.native import why_unavailable

needs_compiler = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch):
    """Seven rows at a time, of which three are summed at once: pieces that end inside sequences and heads."""
    monkeypatch.setitem(sketch_networks.chunked._PIECE_ROWS, "cpu", 7)
    monkeypatch.setattr(sketch_networks.chunked, "_SUMMED_ROWS", 3)


def build(
    degree: int = 4, share: str = "layer", sketch_size: int = 5, head_dim: int = 6, **networks: Any
) -> LearnedSketch:
    torch.manual_seed(0)
    sizes = {"degree": degree, "sketch_size": sketch_size, "num_kv_heads": 2}
    sketch = LearnedSketch(head_dim, **sizes, share=share, **networks).double()
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
    found = sketch_networks.learned_sketch(x, [*one.weights(), *other.weights()], 2, backend="reference")
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_network_is_its_stages_one_after_another(activation: str):
    """Three by hand, with modules of PyTorch's."""
    one, other = build(depth=3, activation=activation).networks
    x, size = torch.randn(2, 3, 5, 6, dtype=torch.float64), 5
    function = {"gelu": torch.nn.GELU(approximate="tanh"), "relu": torch.nn.ReLU(), "silu": torch.nn.SiLU()}[activation]

    def network(f: torch.nn.Module) -> Tensor:
        first = f.input_down(function(f.input_up(f.input_norm(x))))
        second = f.middle_down(function(f.middle_up(f.middle_norm(first))))
        return f.middle_2_down(function(f.middle_2_up(f.middle_2_norm(second))))

    expected = size**0.5 * torch.tanh(size**-0.5 * network(one) * network(other))
    options = {"depth": 3, "activation": activation}
    found = sketch_networks.learned_sketch(x, [*one.weights(), *other.weights()], 2, **options, backend="reference")
    torch.testing.assert_close(found, expected)


EVERY_NETWORK = [
    pytest.param((depth, activation, *shared), id=f"{depth}-{activation}-{shared[0]}-{shared[1]}", marks=one.marks)
    for one in pairs_always(
        {"depth": (1, 2, 3, 4), "activation": tuple(ACTIVATIONS), "shared": ((4, "layer"), (8, "head"))}
    )
    for depth, activation, shared in [one.values]
]


def of_networks(dtype: torch.dtype, backend: str, depth: int, activation: str, degree: int, share: str) -> list[Tensor]:
    """Features and the gradients of x and of all weights, of the same numbers in any dtype."""
    sketch = build(degree, share, expansion=3, depth=depth, activation=activation).float()
    given = [torch.randn(3, 4, 45, 6), *(weight for one in sketch.networks for weight in one.weights())]
    cotangent = torch.randn(3, 4, 45, 5).to(dtype)
    x, *weights = tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in given]
    options = {"depth": depth, "activation": activation, "backend": backend}
    features = sketch_networks.learned_sketch(x, weights, degree // 2, **options)
    return [features.detach(), *torch.autograd.grad(features, tensors, cotangent)]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    return torch.stack([(a - b).norm().double() / b.norm() for a, b in zip(found, expected, strict=True)]).max().item()


@pytest.mark.parametrize("network", EVERY_NETWORK)
@pytest.mark.usefixtures("small_pieces")
def test_the_chunked_backend_computes_networks_of_any_depth_and_activation(network: tuple):
    found, expected = (of_networks(torch.float64, backend, *network) for backend in ("chunked", "reference"))
    assert largest_error(found, expected) < 1e-11


@needs_compiler
@pytest.mark.parametrize("network", EVERY_NETWORK)
def test_the_native_backend_errs_as_the_definition_does_in_float32(network: tuple):
    expected = of_networks(torch.float64, "reference", *network)
    found, plain = (of_networks(torch.float32, backend, *network) for backend in ("native", "reference"))
    assert largest_error(found, expected) < 5 * largest_error(plain, expected)  # measured: at most 2.4 times


def test_the_names_of_the_programs_activations_are_those_of_the_table():
    assert tuple(ACTIVATIONS) == _ACTIVATIONS


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_in_place_and_its_derivative_are_its_formulas(activation: str):
    formula, apply, apply_, backward = ACTIVATIONS[activation]
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])]).requires_grad_()
    grad = torch.linspace(-1, 2, x.numel())
    expected = formula(x)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    found, place = apply(x.detach()), x.detach().clone()
    assert apply_(place, torch.empty_like(x)) is place
    for result in (found[0], place):
        torch.testing.assert_close(result, expected.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(backward(grad, x.detach(), found), expected_grad, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", ["chunked", pytest.param("native", marks=needs_compiler), "reference"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_not_a_number_stays_so(activation: str, backend: str):
    sketch, x = build(activation=activation).float(), torch.randn(1, 2, 40, 6)
    x[0, 1, 7, 3] = torch.nan
    weights = [weight for one in sketch.networks for weight in one.weights()]
    features = sketch_networks.learned_sketch(x, weights, 2, activation=activation, backend=backend)
    assert features.isnan().nonzero()[:, :3].unique(dim=0).tolist() == [[0, 1, 7]]


def of_several(sketch: LearnedSketch, inputs: list[Tensor], backend: str, *, together: bool) -> list[Tensor]:
    """Features of each, and gradients of each and of all weights, from one call or from a call for each."""
    weights = [weight for one in sketch.networks for weight in one.weights()]
    tensors = [x.detach().requires_grad_() for x in inputs]
    call = partial(sketch_networks.learned_sketches, weights=weights, leaves=sketch.degree // 2, backend=backend)
    features = call(tensors) if together else [call([x])[0] for x in tensors]
    gradients = torch.autograd.grad([one.sin().sum() for one in features], [*tensors, *weights])
    return [*(one.detach() for one in features), *gradients]


@pytest.mark.parametrize("backend", ["chunked", pytest.param("native", marks=needs_compiler), "reference"])
@pytest.mark.parametrize("share", ["layer", "head"])
def test_several_inputs_get_their_own_features_and_weights_the_sum_of_gradients(backend: str, share: str):
    sketch = build(share=share).float()
    inputs = [torch.randn(2, heads, length, 6) for heads, length in ((4, 21), (2, 9))]
    found, expected = (of_several(sketch, inputs, backend, together=together) for together in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", ["chunked", pytest.param("native", marks=needs_compiler)])
def test_what_gets_no_gradient_adds_none(backend: str):
    sketch, x, y = build().float(), *torch.randn(2, 1, 2, 9, 6).requires_grad_()
    weights = [weight for one in sketch.networks for weight in one.weights()]
    _, features = sketch_networks.learned_sketches([x, y], weights, 2, backend=backend)
    alone = sketch_networks.learned_sketch(y, weights, 2, backend=backend)
    of_x, *found = torch.autograd.grad(features.sum(), [x, y, *weights])
    assert not of_x.any()
    expected = torch.autograd.grad(alone.sum(), [y, *weights])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", ["chunked", pytest.param("native", marks=needs_compiler)])
def test_gradients_have_the_dtypes_of_their_weights(backend: str):
    """Norms may stay in float32 where matrices do not."""
    weights = [weight.detach().float() for one in build().networks for weight in one.weights()]
    mixed = [(w.bfloat16() if w.dim() == 2 else w).requires_grad_() for w in weights]
    x = torch.randn(1, 2, 9, 6)
    found, expected = (
        torch.autograd.grad(sketch_networks.learned_sketch(x, given, 2, backend=backend).sum(), given)
        for given in (mixed, [w.detach().float().requires_grad_() for w in mixed])
    )
    assert [one.dtype for one in found] == [w.dtype for w in mixed]
    assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(found, expected, strict=True))


def test_inputs_of_one_call_have_one_dtype_and_queries_and_keys_may_have_two():
    sketch, x = build().float(), torch.randn(1, 2, 300, 6)
    weights = [weight for one in sketch.networks for weight in one.weights()]
    for inputs in ([x, x.double()], [x, x[..., :4]], []):
        with pytest.raises(ValueError, match="expected inputs of one dtype and width on one device, got"):
            sketch_networks.learned_sketches(inputs, weights, 2)
    query_features, key_features = sketch.map_both(x, x.double())
    assert torch.equal(query_features, sketch.map(x))
    assert torch.equal(key_features, sketch.map(x.double()))


@needs_compiler
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
    torch.library.opcheck(torch.ops.polysketch.learned_sketch.default, ([x], weights, 2, 2, "gelu", backend))


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


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stage_more_costs_its_matrices(depth: int):
    sketch, x = build(depth=depth), torch.randn(2, 2, 7, 6, dtype=torch.float64)
    products = 8 * (2 * 6 * 5 + (4 * depth - 2) * 5**2)
    assert sum(parameter.numel() for parameter in sketch.parameters() if parameter.dim() == 2) == products
    with FlopCounterMode(display=False) as counted:
        sketch.map(x)
    assert counted.get_total_flops() == 2 * products * (2 * 2 * 7)


def test_a_depth_is_a_positive_integer_and_an_activation_has_a_name_that_is_known():
    with pytest.raises(ValueError, match="depth must be"):
        LearnedSketch(8, depth=0)
    with pytest.raises(TypeError, match="depth must be"):
        LearnedSketch(8, depth=1.5)
    with pytest.raises(ValueError, match="unknown activation 'swish'; known activations: gelu, relu, silu"):
        LearnedSketch(8, activation="swish")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"depth": 3}, ValueError, "expected 24 weights for every map, of 2 networks of depth 3, got 16"),
        ({"depth": 0}, ValueError, "depth must be at least 1"),
        ({"activation": "tanh"}, ValueError, "unknown activation 'tanh'"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_weights_of_other_networks_are_refused(options: dict, error: type[Exception], message: str, backend: str):
    """A program that took them would read past the end."""
    weights = [weight for one in build().networks for weight in one.weights()]
    with pytest.raises(error, match=message):
        sketch_networks.learned_sketch(torch.randn(1, 2, 5, 6), weights, 2, **options, backend=backend)


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
