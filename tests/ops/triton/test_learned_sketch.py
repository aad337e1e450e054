"""The programs of the learned sketch under Triton's interpreter, against the formula in float64.

TRITON_INTERPRET=1 python -m pytest tests/ops/triton
"""

import math

import pytest
import torch
import triton as compiler
import triton.language as tl  # noqa: F401 - the interpreter looks for it where a function is defined

from attention.covering import first_always
from polysketch.feature_maps import LearnedSketch
from polysketch.ops.learned_sketch import ACTIVATIONS, learned_sketch, learned_sketch_backend, learned_sketches
from polysketch.ops.learned_sketch.triton import launcher, weight_sums
from polysketch.ops.learned_sketch.triton.programs import networks as programs
from polysketch.ops.triton import forced

SMALL = {"TOKENS": 16, "BLOCK": 32, "num_warps": 4, "num_stages": 1}
PROGRAMS = ("learned_sketch_inputs_backward", "learned_sketch_weights_backward")


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """What a program forgets to write is NaN, and no comparison passes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_blocks():
    """Several tiles and blocks of hidden units at sizes that the interpreter can do."""
    with forced(**dict.fromkeys(PROGRAMS, SMALL), learned_sketch={**SMALL, "resident": 0}):
        yield


@pytest.fixture
def resident(small_blocks, monkeypatch):
    """Weights in shared memory, through several tiles."""
    monkeypatch.setattr(launcher, "_multiprocessors", lambda device: 3)
    with forced(learned_sketch={**SMALL, "resident": 1}):
        yield


def case(degree, share, shape, size, seed=0, expansion=8, depth=2):
    """x, weights none of which is zero or one, the number of leaves, a gradient of the features."""
    torch.manual_seed(seed)
    sizes = {"degree": degree, "sketch_size": size, "expansion": expansion, "depth": depth}
    sketch = LearnedSketch(shape[3], **sizes, num_kv_heads=2, share=share)
    weights = [weight.detach() + 0.1 * torch.randn_like(weight) for one in sketch.networks for weight in one.weights()]
    return torch.randn(shape), weights, degree // 2, torch.randn(*shape[:3], size)


def features_and_gradients(x, weights, leaves, cotangent, backend, **options):
    """Features and the gradients of x and all weights."""
    tensors = [tensor.clone(memory_format=torch.preserve_format).requires_grad_() for tensor in (x, *weights)]
    features = learned_sketch(tensors[0], tensors[1:], leaves, backend=backend, **options)
    return [features.detach(), *torch.autograd.grad(features, tensors, cotangent)]


def relative_errors(x, weights, leaves, cotangent, dtype=torch.float32, **options):
    """Of the features and every gradient, the triton backend's in `dtype` against the formula in float64."""
    rounded = [tensor.to(dtype) for tensor in (x, *weights, cotangent)]
    found, expected = (
        features_and_gradients(one[0], one[1:-1], leaves, one[-1], backend, **options)
        for one, backend in ((rounded, "triton"), ([tensor.double() for tensor in rounded], "chunked"))
    )
    assert [a.dtype for a in found] == [dtype] * len(found)
    # max() would pass over what is not a number
    return [((a - b).norm() / b.norm()).nan_to_num(math.inf).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("degree", "share", "shape", "size"),
    first_always(
        [
            (4, "layer", (1, 2, 9, 24), 10),
            (4, "head", (1, 4, 5, 16), 5),
            (8, "layer", (1, 2, 7, 20), 4),
            (4, "layer", (1, 1, 1, 70), 3),
        ],
        2,
        several=True,
    ),
)
def test_features_and_gradients_agree_with_the_formula_in_float64(degree, share, shape, size):
    assert max(relative_errors(*case(degree, share, shape, size))) < 1e-5 * degree


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("expansion", "size"), first_always([(3, 7), (1, 3)], several=True))
def test_networks_may_have_any_number_of_hidden_units(expansion, size):
    assert max(relative_errors(*case(4, "layer", (1, 2, 9, 12), size, expansion=expansion))) < 4e-5


NETWORKS = pytest.mark.parametrize(
    ("depth", "activation", "degree", "share"),
    first_always(
        [
            (1, "relu", 8, "head"),
            (2, "silu", 4, "head"),
            (3, "gelu", 4, "layer"),
            (1, "gelu", 4, "layer"),
            (2, "relu", 4, "layer"),
            (3, "gelu", 4, "head"),
            (3, "silu", 8, "layer"),
            (4, "relu", 4, "layer"),
        ],
        3,
        several=True,
    ),
)


def errors_of_networks(depth, activation, degree, share, dtype=torch.float32):
    """Of networks with 3 hidden units a feature."""
    inputs = case(degree, share, (1, 2, 9, 12), 5, expansion=3, depth=depth)
    return relative_errors(*inputs, dtype, depth=depth, activation=activation)


@pytest.mark.usefixtures("small_blocks")
@NETWORKS
def test_networks_may_have_any_depth_and_activation(depth, activation, degree, share):
    assert max(errors_of_networks(depth, activation, degree, share)) < 1e-5 * degree


@pytest.mark.usefixtures("resident")
@NETWORKS
def test_so_may_networks_whose_weights_stay_in_shared_memory(depth, activation, degree, share):
    assert max(errors_of_networks(depth, activation, degree, share)) < 1e-5 * degree


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("depth", "activation"), first_always([(3, "gelu"), (1, "silu"), (2, "relu")], several=True))
def test_half_precision_of_any_network_differs_by_its_rounding(depth, activation):
    assert max(errors_of_networks(depth, activation, 4, "layer", torch.float16)) < 4e-3


@pytest.mark.usefixtures("resident")
@pytest.mark.parametrize(
    ("degree", "share", "shape", "size"),
    first_always([(4, "head", (1, 2, 33, 12), 6), (8, "layer", (1, 1, 33, 16), 4)], several=True),
)
def test_resident_weights_change_nothing(degree, share, shape, size):
    assert (
        max(relative_errors(*case(degree, share, shape, size, expansion=7 if share == "head" else 8))) < 1e-5 * degree
    )


def test_the_shipped_configurations_agree_with_the_formula():
    assert max(relative_errors(*case(4, "layer", (1, 1, 33, 16), 16))) < 1e-5


@compiler.jit
def exact_tanh(x):
    return programs.tanh(x, False)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("activation", first_always(list(ACTIVATIONS)))
def test_the_formulas_of_bfloat16_are_the_same_but_for_their_tanh(monkeypatch, activation):
    """They are written around an instruction that the interpreter does not have."""
    constants = launcher.constants_of
    monkeypatch.setattr(launcher, "constants_of", lambda call, stage: {**constants(call, stage), "FAST": True})
    monkeypatch.setattr(programs, "_fast_tanh", exact_tanh)
    assert max(relative_errors(*case(4, "layer", (1, 2, 9, 16), 6), activation=activation)) < 1e-5


@pytest.mark.usefixtures("small_blocks")
def test_half_precision_differs_by_its_rounding():
    assert max(relative_errors(*case(4, "layer", (1, 2, 9, 16), 6), dtype=torch.float16)) < 4e-3


@pytest.mark.usefixtures("small_blocks")
def test_float16_weights_and_activations_may_leave_its_range_inside():
    x, weights, leaves, cotangent = case(4, "layer", (1, 1, 5, 16), 4)
    for up in (weights[2], weights[10]):
        up *= 6e4  # hidden activations and middles beyond 65504; the norm that follows divides by them
    assert max(relative_errors(x, weights, leaves, cotangent, dtype=torch.float16)) < 4e-3


@pytest.mark.usefixtures("small_blocks")
def test_any_strides_of_inputs_and_gradients_give_the_same():
    x, weights, leaves, cotangent = case(4, "head", (2, 2, 5, 12), 4)
    plain = features_and_gradients(x, weights, leaves, cotangent, "triton")
    between = x.transpose(1, 2).contiguous().transpose(1, 2)
    inside = x.transpose(1, 3).contiguous().transpose(1, 3)
    assert between.stride() != x.stride()
    assert inside.stride(3) != 1
    for turned in (between, inside):
        turned_grad = cotangent.transpose(1, 3).contiguous().transpose(1, 3)
        found = features_and_gradients(turned, weights, leaves, turned_grad, "triton")
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.usefixtures("small_blocks")
def test_gradients_of_weights_are_summed_over_spans_of_tiles(monkeypatch):
    monkeypatch.setattr(weight_sums, "_LEAST_TILES", 1)
    one, three = case(4, "layer", (1, 1, 40, 16), 4), []
    for count in (1, 512):
        monkeypatch.setattr(weight_sums, "_PROGRAMS", count)
        three.append(features_and_gradients(*one, "triton"))
    assert all((a - b).norm() < 1e-5 * b.norm() for a, b in zip(*three, strict=True))
    assert max(relative_errors(*one)) < 1e-5


@pytest.mark.usefixtures("small_blocks")
def test_stages_may_have_hidden_units_in_different_slices(monkeypatch):
    chosen = weight_sums.configuration_of

    def by_width(program, call, stage, device):
        return {**chosen(program, call, stage, device), "BLOCK": 16 if stage.inputs == 24 else 32}

    monkeypatch.setattr(weight_sums, "configuration_of", by_width)
    assert max(relative_errors(*case(4, "layer", (1, 1, 9, 24), 8))) < 1e-5


@pytest.mark.usefixtures("small_blocks")
def test_weights_get_the_sum_of_the_gradients_of_several_inputs(monkeypatch):
    monkeypatch.setattr(weight_sums, "_LEAST_TILES", 1)
    x, weights, leaves, cotangent = case(4, "head", (1, 4, 9, 6), 3, expansion=3)
    inputs, cotangents = [x, x[:, :2, :5].flip(1)], [cotangent, cotangent[:, 2:, 4:]]
    tensors = [tensor.clone().requires_grad_() for tensor in (*inputs, *weights)]
    features = learned_sketches(tensors[:2], tensors[2:], leaves, backend="triton")
    found = torch.autograd.grad(features, tensors, cotangents)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    formula = [learned_sketch(one, exact[2:], leaves, backend="reference") for one in exact[:2]]
    expected = torch.autograd.grad(formula, exact, [one.double() for one in cotangents])
    for one, other in zip([*features, *found], [*formula, *expected], strict=True):
        assert (one - other).norm() < 4e-5 * other.norm()


@pytest.mark.parametrize("degree", [4, 8])
def test_a_training_step_has_few_operations_beside_its_programs_however_many_weights_there_are(degree, operations):
    """On a GPU each takes the host as long as a program that computes something."""
    x, weights, leaves, cotangent = case(degree, "layer", (1, 2, 9, 16), 8, depth=3)
    tensors = [tensor.requires_grad_() for tensor in (x, x.detach().clone(), *weights)]
    options = {"depth": 3, "backend": "triton"}
    with operations as forward:
        features = learned_sketches(tensors[:2], tensors[2:], leaves, **options)
    assert forward.found == ["cat"]  # under autocast one more, which rounds
    forward.found.clear()
    with operations as backward:
        torch.autograd.grad(features, tensors, [cotangent, cotangent])
    assert backward.found == ["cat", *["sum.IntList_out"] * 2 * (leaves.bit_length() - 1)]  # two a level


@pytest.mark.usefixtures("small_blocks")
def test_no_rows_have_no_features_and_gradients_of_zero():
    _, weights, leaves, _ = case(4, "layer", (1, 1, 1, 16), 4)
    found = features_and_gradients(torch.ones(2, 1, 0, 16), weights, leaves, torch.ones(2, 1, 0, 4), "triton")
    assert found[0].shape == (2, 1, 0, 4)
    assert all(not gradient.any() for gradient in found[1:])


@pytest.mark.usefixtures("small_blocks")
def test_small_features_keep_their_relative_precision():
    """tanh near zero: 1 - 2 / (e^2x + 1) would lose it."""
    x, weights, leaves, _ = case(4, "layer", (1, 1, 16, 16), 8)
    for down in (weights[7], weights[15]):
        down *= 1e-3
    found = learned_sketch(x, weights, leaves, backend="triton")
    expected = learned_sketch(x.double(), [weight.double() for weight in weights], leaves, backend="chunked")
    assert found.abs().max() < 1e-4
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.usefixtures("small_blocks")
def test_large_features_are_bounded_with_a_gradient_of_zero():
    """tanh far from zero: e^x alone would overflow."""
    x, weights, leaves, cotangent = case(4, "layer", (1, 1, 16, 16), 8)
    for down in (weights[7], weights[15]):
        down *= 1e4
    features, grad_x, *_ = features_and_gradients(x, weights, leaves, cotangent, "triton")
    assert torch.allclose(features.abs(), torch.full_like(features, 8**0.5))
    assert torch.isfinite(grad_x).all()


def test_what_the_programs_cannot_take_is_refused_when_asked_for_and_avoided_by_auto():
    x = torch.randn(1, 1, 4, 8)
    assert learned_sketch_backend(x, "triton") == "triton"
    assert learned_sketch_backend(x) != "triton"
    for dtype, reason in ((torch.bfloat16, "no bfloat16 products"), (torch.float64, r"got torch\.float64")):
        with pytest.raises(RuntimeError, match=reason):
            learned_sketch(x.to(dtype), [], 2, backend="triton")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("transposed", first_always([True, False]))
def test_it_is_an_operator_whose_fake_says_where_numbers_lie(transposed):
    """Compiled code trusts the fake's strides."""
    x, weights, leaves, grad = case(4, "layer", (1, 2, 5, 6), 4)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    operator = torch.ops.polysketch.learned_sketch_backward.default
    torch.library.opcheck(operator, ([grad], [x], weights, leaves, 2, "silu", "triton"))
